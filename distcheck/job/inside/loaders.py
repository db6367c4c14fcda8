"""Data loaders of a script: which samples were handed out, in which order, in which epoch."""

import weakref
from typing import TYPE_CHECKING, Any

import torch

from distcheck.job.inside import tensors
from distcheck.job.recording import Batch, Iteration

if TYPE_CHECKING:
    from distcheck.job.inside.step_file import StepFile


class Loaders:
    """Numbers loaders, the passes over each, and the batches of each pass."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._epochs: dict[int, int] = {}
        self._places: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
        self._batches: list[tuple[Batch, list[torch.Tensor]]] = []
        self._iterations: list[Iteration] = []

    def number(self, loader: Any) -> int:
        """Loaders are numbered as the script first asks for their length, or their batches."""
        return self._numbers.setdefault(loader, len(self._numbers))

    def place_of(self, iterator: Any) -> tuple[int, int, int] | None:
        """Loader, pass and number of the batch that would be handed out next."""
        place = self._places.get(iterator)
        return None if place is None else (place[0], place[1], place[2])

    def iterates(self, loader: Any, iterator: Any) -> tuple[int, int]:
        """Notes a pass; returns the numbers of its loader and of the pass."""
        number = self.number(loader)
        epoch = self._epochs.get(number, -1) + 1
        self._epochs[number] = epoch
        self._places[iterator] = [number, epoch, 0]
        sampler = loader.sampler
        length = length_of(loader)
        self._iterations.append(
            Iteration(
                loader=number,
                epoch=epoch,
                length=length,
                sampler=type(sampler).__name__,
                shuffles=bool(getattr(sampler, "shuffle", "Random" in type(sampler).__name__)),
                sampler_epoch=getattr(sampler, "epoch", None),
            )
        )
        return number, epoch

    def next_place(self, iterator: Any) -> tuple[int, int, int] | None:
        """Loader, pass and number of the batch that is handed out now."""
        place = self._places.get(iterator)
        if place is None:
            return None
        place[2] += 1
        return place[0], place[1], place[2] - 1

    def batch(self, iterator: Any, batch: Any) -> None:
        """Notes a batch, until the step that it is handed out in is written."""
        place = self.next_place(iterator)
        given = tensors.leaves(batch)
        if place is None or not given or not torch.is_grad_enabled():
            return
        loader, epoch, number = place
        rows = tensors.rows_of(given)
        noted = Batch(loader=loader, epoch=epoch, number=number, leaves=(), rows=rows)
        self._batches.append((noted, [t.detach().cpu() for t in given]))

    def take(self, file: "StepFile") -> tuple[Batch, ...]:
        """The batches since the last step, their tensors given to its file."""
        taken = tuple(
            Batch(
                loader=batch.loader,
                epoch=batch.epoch,
                number=batch.number,
                leaves=tuple(file.add_data(tensor) for tensor in given),
                rows=batch.rows,
            )
            for batch, given in self._batches
        )
        self._batches = []
        return taken

    def take_iterations(self) -> tuple[Iteration, ...]:
        """The passes that began since the last step."""
        taken, self._iterations = tuple(self._iterations), []
        return taken


def length_of(loader: Any) -> int:
    """How many batches a loader has; -1 where it cannot know, as of an iterable data set."""
    try:
        return len(loader)
    except TypeError:
        return -1
