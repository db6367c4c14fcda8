"""Records data loaders: which samples they load, in which order, and the epoch."""

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
from distcheck.machine.compat import wrap_index_iterator
from distcheck.recordings.jobs.records import LoadedBatch, LoaderIteration, digest

if TYPE_CHECKING:
    from distcheck.job.inside.step_file import StepFile

Place = tuple[int, int, int]  # loader, pass over it, batch number
_SETTINGS = ("seed", "rank", "num_replicas")  # of DistributedSampler and similar samplers
_MOST_AHEAD = 4096  # batches prefetched by workers


@dataclass
class _HandedOut:
    """A loaded batch that no forward pass has used yet, or that a pending step uses."""

    batch: LoadedBatch
    tensors: list[torch.Tensor]
    rows: set[str]  # digests of each tensor's rows
    is_used: bool = False
    is_evaluated: bool = False


@dataclass
class _Pass:
    """A pass over a loader, with the sampler's indices for batches not yet loaded."""

    loader: int
    epoch: int
    number: int = 0
    indices: deque[Any] = field(default_factory=lambda: deque(maxlen=_MOST_AHEAD))


class Loaders:
    """Numbers loaders, the passes over each, and the batches of each pass."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0  # numbers of deleted loaders are not reused
        self._epochs: dict[int, int] = {}
        self._passes: weakref.WeakKeyDictionary[Any, _Pass] = weakref.WeakKeyDictionary()
        self._given: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self.datasets: dict[int, Any] = {}  # of loaders whose sampler yields indices
        self._handed: list[_HandedOut] = []
        self._iterations: list[LoaderIteration] = []
        self._before: dict[str, str] = {}
        self._drawn: dict[str, str] = {}

    def number(self, loader: Any) -> int:
        """Return a loader's number, in the order of the script's first use."""
        if loader not in self._numbers:
            self._numbers[loader], self._next = self._next, self._next + 1
        return self._numbers[loader]

    def place_of(self, iterator: Any) -> Place | None:
        """Return loader, pass and number of the next batch."""
        at = self._passes.get(iterator)
        return None if at is None else (at.loader, at.epoch, at.number)

    def samples_from(self, iterator: Any) -> None:
        """Record the sampler's indices from now on; workers prefetch."""
        self._given[iterator] = deque(maxlen=_MOST_AHEAD)
        wrap_index_iterator(
            iterator, lambda indices: _record_samples(indices, self._given[iterator])
        )

    def iterates(self, loader: Any, iterator: Any) -> tuple[int, int]:
        """Record the start of a pass. Return the numbers of its loader and of the pass. Batches of
        an earlier pass over the same loader that were not used are dropped.
        """
        number = self.number(loader)
        epoch = self._epochs.get(number, -1) + 1
        self._epochs[number] = epoch
        self._passes[iterator] = _Pass(number, epoch, indices=self._given.get(iterator, deque()))
        if hasattr(loader.dataset, "__getitem__") and getattr(loader, "in_order", True):
            self.datasets[number] = loader
        self._handed = [o for o in self._handed if o.is_used or o.batch.loader != number]
        sampler, batches = loader.sampler, loader.batch_sampler
        is_custom = batches is not None and type(batches) is not torch.utils.data.BatchSampler
        settings = {name: getattr(sampler, name, None) for name in _SETTINGS}
        self._iterations.append(
            LoaderIteration(
                loader=number,
                epoch=epoch,
                length=length_of(loader),
                sampler=type(sampler).__name__,
                shuffles=bool(getattr(sampler, "shuffle", "Random" in type(sampler).__name__)),
                sampler_epoch=getattr(sampler, "epoch", None),
                samples=length_of(loader.dataset),
                batch_sampler=type(batches).__name__ if is_custom else "",
                settings={name: one for name, one in settings.items() if isinstance(one, int)},
            )
        )
        return number, epoch

    def fetches(self) -> None:
        """Remember the RNG states before this process creates a batch."""
        self._before = tensors.random_digests()

    def fetched(self) -> None:
        """Record which RNG streams were used to create the batch."""
        now = tensors.random_digests()
        self._drawn = {name: d for name, d in self._before.items() if now.get(name) != d}

    def next_place(self, iterator: Any) -> tuple[Place | None, tuple[int, ...]]:
        """Return loader, pass and number of the current batch, and its indices."""
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
        """Record a batch until the step in which it is loaded is written."""
        place, indices = self.next_place(iterator)
        given, drawn = tensors.leaves(batch), self._drawn
        self._drawn = {}
        if place is None or not given or not torch.is_grad_enabled():
            return
        loader, epoch, number = place
        rows = tensors.digests_of_samples(given)
        noted = LoadedBatch(
            loader=loader, epoch=epoch, number=number, leaves=(), rows=rows, indices=indices,
            files=_files_of(batch, len(indices)), drawn=drawn,
        )  # fmt: skip
        own = {row for one in given for row in tensors.digests_of_samples([one])}
        self._handed.append(_HandedOut(noted, [t.detach().cpu().clone() for t in given], own))

    def for_pass(self, inputs: Sequence[torch.Tensor]) -> tuple[Place, ...]:
        """Return the batches that a forward pass uses: those that contain its inputs or, if the
        script has computed the inputs, the first unused batch of each loader.
        """
        found = self._find(inputs)
        for is_used in (False, True):
            own = [o for o in self._handed if o.is_used is is_used and not o.is_evaluated]
            found = found or list({o.batch.loader: o for o in reversed(own)}.values())
        for one in found:
            one.is_used = True
        return tuple((o.batch.loader, o.batch.epoch, o.batch.number) for o in found)

    def evaluated(self, inputs: Sequence[torch.Tensor]) -> None:
        """Mark the batches of inputs to a model that is not in training."""
        for one in self._find(inputs) if self._handed else ():
            one.is_evaluated = True

    def _find(self, inputs: Sequence[torch.Tensor]) -> list[_HandedOut]:
        """Return the batches that contain the inputs. Different batches may share rows, such as
        masks. A batch counts only if it has rows that batches with more common rows do not have.
        """
        left = {row for one in inputs for row in tensors.digests_of_samples([one])}
        found = set[int]()
        for one in sorted(self._handed, key=lambda o: (-len(o.rows & left), o.is_used)):
            if one.rows & left:
                found.add(id(one))
                left = left - one.rows
        return [one for one in self._handed if id(one) in found]

    def take(self, file: "StepFile") -> tuple[LoadedBatch, ...]:
        """Write the tensors of batches that are not written yet to the file of a step. Used batches
        are dropped when the next step is written, because several passes of a step may use them.
        """
        taken = []
        for one in self._handed:
            leaves = tuple(file.add_data(tensor) for tensor in one.tensors)
            if not one.batch.leaves:
                one.batch = replace(one.batch, leaves=leaves)
                taken.append(one.batch)
        self._handed = [one for one in self._handed if not one.is_used]
        return tuple(taken)

    def take_iterations(self) -> tuple[LoaderIteration, ...]:
        """Return the passes that started since the last step."""
        taken, self._iterations = tuple(self._iterations), []
        return taken


class LoaderWorkerListener(NullListener):
    """Listener in a worker process of a data loader. It records the states of the RNG streams that
    the worker's first batch used. Ranks with a state in common generate their samples from the same
    random numbers.
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


def _record_samples(samples: Iterator[Any], given: deque[Any]) -> Iterator[Any]:
    for one in samples:
        given.append(one)
        yield one


def _files_of(batch: Any, samples: int) -> tuple[str, ...]:
    """Return digests of the file names in a batch, if it names one existing file per sample."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    for part in parts if isinstance(parts, Iterable) else ():
        several = part if isinstance(part, list | tuple) else []
        names = [one for one in several if isinstance(one, str | os.PathLike)]
        if len(several) == len(names) == samples > 0 and all(map(os.path.exists, names)):
            return tuple(digest(os.fsencode(one)) for one in names)
    return ()


def length_of(loader: Any) -> int:
    """Return the length of a loader or a data set; -1 if unknown, as for an iterable data set."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError, RuntimeError, ValueError):
        return -1
