"""Data loaders of a script: which samples were handed out, in which order, in which epoch."""

import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from distcheck import private
from distcheck.job.inside import tensors
from distcheck.job.inside.listener import NullListener
from distcheck.machine.compat import note_samples
from distcheck.recordings.jobs.records import Iteration, LoadedBatch, digest

if TYPE_CHECKING:
    from distcheck.job.inside.step_file import StepFile

Place = tuple[int, int, int]  # loader, pass over it, number of the batch
_MOST_AHEAD = 4096  # batches that workers have been asked for


@dataclass
class _HandedOut:
    """A batch that no forward pass has had yet, or none of a step that is written."""

    batch: LoadedBatch
    tensors: list[torch.Tensor]
    rows: set[str]  # of each of its tensors
    is_used: bool = False
    is_evaluated: bool = False


@dataclass
class _Pass:
    """A pass over a loader; what its sampler gave, until the batch is handed out."""

    loader: int
    epoch: int
    number: int = 0
    indices: deque[Any] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))


class Loaders:
    """Numbers loaders, the passes over each, and the batches of each pass."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0  # loaders that are gone have their numbers
        self._epochs: dict[int, int] = {}
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self.datasets: dict[int, Any] = {}  # of loaders whose sampler gives indices
        self._handed: list[_HandedOut] = []
        self._iterations: list[Iteration] = []
        self._before: dict[str, str] = {}
        self._drawn: dict[str, str] = {}

    def number(self, loader: Any) -> int:
        """Loaders are numbered as the script first asks for their length, or their batches."""
        if loader not in self._numbers:
            self._numbers[loader], self._next = self._next, self._next + 1
        return self._numbers[loader]

    def place_of(self, iterator: Any) -> Place | None:
        """Loader, pass and number of the batch that would be handed out next."""
        at = self._passes.get(iterator)
        return None if at is None else (at.loader, at.epoch, at.number)

    def samples_from(self, iterator: Any) -> None:
        """Notes what the sampler gives from now on; workers ask ahead."""
        self._given[iterator] = deque(maxlen=_MOST_AHEAD)
        note_samples(iterator, lambda indices: _noting(indices, self._given[iterator]))

    def iterates(self, loader: Any, iterator: Any) -> tuple[int, int]:
        """Notes a pass; returns the numbers of its loader and of the pass. What an earlier pass
        over the same loader has handed out, and no forward pass has had, is for none.
        """
        number = self.number(loader)
        epoch = self._epochs.get(number, -1) + 1
        self._epochs[number] = epoch
        self._passes[iterator] = _Pass(number, epoch, indices=self._given.get(iterator, deque()))
        if hasattr(loader.dataset, "__getitem__") and getattr(loader, "in_order", True):
            self.datasets[number] = loader
        self._handed = [o for o in self._handed if o.is_used or o.batch.loader != number]
        sampler = loader.sampler
        self._iterations.append(
            Iteration(
                loader=number,
                epoch=epoch,
                length=length_of(loader),
                sampler=type(sampler).__name__,
                shuffles=bool(getattr(sampler, "shuffle", "Random" in type(sampler).__name__)),
                sampler_epoch=getattr(sampler, "epoch", None),
            )
        )
        return number, epoch

    def fetches(self) -> None:
        """A batch is about to be made in this process."""
        self._before = tensors.random_digests()

    def fetched(self) -> None:
        """It is made: notes which random streams that has drawn from."""
        now = tensors.random_digests()
        self._drawn = {name: d for name, d in self._before.items() if now.get(name) != d}

    def next_place(self, iterator: Any) -> tuple[Place | None, tuple[int, ...]]:
        """Loader, pass and number of the batch that is handed out now, and its indices."""
        at = self._passes.get(iterator)
        if at is None:
            return None, ()
        at.number += 1
        indices = at.indices.popleft() if at.indices else ()
        return (at.loader, at.epoch, at.number - 1), self._indices(at.loader, indices)

    def _indices(self, loader: int, given: Any) -> tuple[int, ...]:
        several = given if isinstance(given, list | tuple) else [given]
        is_known = loader in self.datasets and all(isinstance(one, int) for one in several)
        return tuple(several) if is_known else ()

    def batch(self, iterator: Any, batch: Any) -> None:
        """Notes a batch, until the step that it is handed out in is written."""
        place, indices = self.next_place(iterator)
        given, drawn = tensors.leaves(batch), self._drawn
        self._drawn = {}
        if place is None or not given or not torch.is_grad_enabled():
            return
        loader, epoch, number = place
        rows = tensors.rows_of(given)
        noted = LoadedBatch(
            loader=loader, epoch=epoch, number=number, leaves=(), rows=rows, indices=indices,
            files=_files_of(batch, len(indices)), drawn=drawn,
        )  # fmt: skip
        own = {row for one in given for row in tensors.rows_of([one])}
        self._handed.append(_HandedOut(noted, [t.detach().cpu().clone() for t in given], own))

    def for_pass(self, inputs: Sequence[torch.Tensor]) -> tuple[Place, ...]:
        """The batches that a forward pass with these inputs has: those that its inputs are of, or,
        where the script has computed its inputs, the first unused one of each loader.
        """
        found = self._with(inputs)
        for is_used in (False, True):
            own = [o for o in self._handed if o.is_used is is_used and not o.is_evaluated]
            found = found or list({o.batch.loader: o for o in reversed(own)}.values())
        for one in found:
            one.is_used = True
        return tuple((o.batch.loader, o.batch.epoch, o.batch.number) for o in found)

    def evaluated(self, inputs: Sequence[torch.Tensor]) -> None:
        """A model was called with these inputs, and not in training."""
        for one in self._with(inputs) if self._handed else ():
            one.is_evaluated = True

    def _with(self, inputs: Sequence[torch.Tensor]) -> list[_HandedOut]:
        """The batches that inputs are of. Rows of several may be alike, as those of masks are: a
        batch is one of them where it has rows that those with more of the rows have not.
        """
        left = {row for one in inputs for row in tensors.rows_of([one])}
        found = set[int]()
        for one in sorted(self._handed, key=lambda o: (-len(o.rows & left), o.is_used)):
            if one.rows & left:
                found.add(id(one))
                left = left - one.rows
        return [one for one in self._handed if id(one) in found]

    def take(self, file: "StepFile") -> tuple[LoadedBatch, ...]:
        """The batches that were not written yet, their tensors given to a step's file. Used ones
        are dropped when the next step is written, to be used by several of its passes.
        """
        taken = []
        for one in self._handed:
            leaves = tuple(file.add_data(tensor) for tensor in one.tensors)
            if not one.batch.leaves:
                one.batch = replace(one.batch, leaves=leaves)
                taken.append(one.batch)
        self._handed = [one for one in self._handed if not one.is_used]
        return tuple(taken)

    def take_iterations(self) -> tuple[Iteration, ...]:
        """The passes that began since the last step."""
        taken, self._iterations = tuple(self._iterations), []
        return taken


class InWorker(NullListener):
    """In a process that a data loader has started: notes the streams that its first batch drew
    from, by the state that they had. Ranks that have such a note in common make their samples
    alike.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._before: dict[str, str] = {}
        self._is_over = False

    def fetches(self) -> None:
        if torch.utils.data.get_worker_info() is not None and not self._is_over:
            self._before = tensors.random_digests()

    def fetched(self) -> None:
        now = tensors.random_digests() if self._before else {}
        for name, state in self._before.items():
            if now.get(name) != state:
                self._is_over = True
                private.write(self._folder / f"drawn-{self._rank:04d}-{name}-{state}", b"")
        self._before = {}


def _noting(samples: Iterator[Any], given: deque[Any]) -> Iterator[Any]:
    for one in samples:
        given.append(one)
        yield one


def _files_of(batch: Any, samples: int) -> tuple[str, ...]:
    """Digests of the names of the files that a batch says its samples are from, if it does."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    for part in parts if isinstance(parts, Iterable) else ():
        several = part if isinstance(part, list | tuple) else []
        names = [one for one in several if isinstance(one, str | os.PathLike)]
        if len(several) == len(names) == samples > 0 and all(map(os.path.exists, names)):
            return tuple(digest(os.fsencode(one)) for one in names)
    return ()


def length_of(loader: Any) -> int:
    """How many batches a loader has; -1 where it cannot know, as of an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return -1
