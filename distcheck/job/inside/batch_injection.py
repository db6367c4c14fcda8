"""Hands a script what the ranks had: batches, inputs, targets and random numbers."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.batch_source import ALL, BatchSource, NotTogetherError, Pairs
from distcheck.job.inside.contents import read_again
from distcheck.job.inside.loaders import Loaders
from distcheck.job.settings import BY_RANK, IN_TURN, JobSettings, Read
from distcheck.recordings.jobs.reading import JobRecording


class BatchInjector:
    """Where a replay is, and what is handed out there. `copy` is what this process is, if it is a
    copy; `fails` ends it where what was recorded does not fit.
    """

    def __init__(
        self, job: JobRecording, settings: JobSettings, fails: Callable[[str], NoReturn]
    ) -> None:
        self._job, self._fails = job, fails
        self.batch_source = BatchSource(job)
        self._loaders = Loaders()
        self.copy, self.mode = settings.task, settings.task_mode
        self.reads: list[Read] = []
        self.step = 0
        self.begin_step()

    def begin_step(self) -> None:
        self.passes = 0  # forward passes of the step
        self._calls = 0  # losses since the last of them
        self._before_backward = 0  # losses since the last backward pass,
        self._passes_before = 0  # and the forward passes before that

    def computes_loss(self) -> None:
        self._calls += 1
        self._before_backward += 1

    def begins_backward(self) -> None:
        """Losses from here on are of the next backward pass."""
        self._before_backward, self._passes_before = 0, self.passes

    @property
    def makes_one(self) -> bool:
        """Whether this copy has several passes in one batch now."""
        copy = self.copy
        return copy is not None and copy.step == self.step and bool(copy.pairs)

    def source(self, number: int) -> Pairs:
        """The ranks and their passes whose inputs are handed out now."""
        if self.makes_one and self.copy is not None:
            return self.copy.pairs
        if self.mode == IN_TURN:
            each = len(self.batch_source.passes(self.step, 0))
            return [(number // each, number % each)]
        if self.copy is not None:
            return self.batch_source.pairs(number, self.copy.rank)
        return self.batch_source.pairs(number, 0 if self.mode == BY_RANK else ALL)

    def iterates(self, loader: Any, iterator: Any) -> None:
        self._loaders.iterates(loader, iterator)

    def length(self, loader: Any) -> int | None:
        return self.batch_source.lengths.get(self._loaders.number(loader))

    def is_over(self, iterator: Any) -> bool:
        """Whether a rank's epoch ended here."""
        place = self._loaders.place_of(iterator)
        if place is None or place[0] not in self.batch_source.lengths:
            return False
        times = self._job.world if self.mode == IN_TURN else 1
        return place[2] >= self.batch_source.lengths[place[0]] * times

    def batch(self, iterator: Any, batch: Any) -> None:
        """Puts the recorded batch into the script's own, and the random streams after it."""
        place, _ = self._loaders.next_place(iterator)
        if place is None:
            return
        loader = self._loaders.datasets.pop(place[0], None)
        if loader is not None and self.copy is None:
            self.reads += read_again(self._job, place[0], loader)
        pairs = self.source(self.passes)
        loader, epoch, number = place
        if self.makes_one:
            places = [(pair[0], self.batch_source.place(loader, self.step, pair)) for pair in pairs]
        elif self.mode == IN_TURN:
            each, world = len(self.batch_source.passes(self.step, 0)), self._job.world
            rank = (number // each) % world
            places = [(rank, (loader, epoch, number // (each * world) * each + number % each))]
        else:
            places = [(rank, place) for rank, _ in pairs]
        longer = self.copy is not None and self.copy.longer
        known = [(rank, there) for rank, there in places if there is not None]
        leaves = self._together(self.batch_source.batch, known, longer=longer)
        if leaves is not None and len(known) == len(places):
            self._put("a batch", tensors.leaves(batch), leaves)
        self.set_random_streams(origin=True)

    def inputs(self, args: Any, kwargs: Any) -> None:
        """Puts in the recorded inputs of the pass that begins, and the random streams before it."""
        found = self._together(self.batch_source.inputs, self.step, self.source(self.passes))
        self.set_random_streams(origin=False)
        own = tensors.inputs_of((args, kwargs))
        for place, tensor in enumerate(own):
            pieces = self.batch_source.pieces(self.step, self.source(self.passes), place)
            if pieces and not _are_of(pieces, tensor):
                self._fails(
                    f"step {self.step}: the pieces of a sequence that the ranks had are not those "
                    "of what the script gives its model as one process; have it read its batches "
                    "from a DataLoader"
                )
        self.passes, self._calls = self.passes + 1, 0
        self._put("the model", own, found)

    def target(self, computed: torch.Tensor, target: Any) -> None:
        """Puts in the recorded target of the same loss, where it fits what was computed."""
        if self.passes == 0 or not isinstance(target, torch.Tensor) or target.requires_grad:
            return
        pairs, call = self.source(self.passes - 1), self._calls
        if self.mode != IN_TURN and not self.makes_one:
            noted = self.batch_source.noted_with(self.step, self._passes_before, self.passes - 1)
            if noted is not None:
                pairs, call = [(rank, noted) for rank, _ in pairs], self._before_backward
        found = self._together(self.batch_source.target, self.step, pairs, call)
        if found is None or found.dtype != target.dtype:
            return
        if found.shape == target.shape or found.shape[:1] == computed.shape[:1]:
            tensors.put(target, found)

    def set_random_streams(self, *, origin: bool) -> None:
        """Those of the forward pass that comes next, in the process of one rank."""
        pairs = self.source(self.passes)
        if len(pairs) == 1 and self.batch_source.has(self.step, pairs):
            tensors.set_random_state(self.batch_source.random(self.step, pairs[0], origin=origin))

    def _together(self, take: Any, *given: Any, **named: Any) -> Any:
        try:
            return take(*given, **named)
        except NotTogetherError as error:
            self._fails(f"step {self.step}: {error}")

    def _put(
        self, what: str, own: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
    ) -> None:
        """Puts recorded tensors into the script's own; the replay ends where they are others."""
        if len(own) != len(given):
            self._fails(
                f"step {self.step}: {what} had {len(given)} tensors on a rank, and {len(own)} as "
                "one process"
            )
        for tensor, recorded in zip(own, given, strict=True):
            # A whole number beside a batch counts its samples or targets, for which one process
            # has its own number: Hugging Face's Trainer hands the model num_items_in_batch.
            if recorded is not None:
                counts = recorded.dim() == tensor.dim() == 0
                if not (counts and float(recorded).is_integer()):
                    tensors.put(tensor, recorded)


def _are_of(pieces: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Whether pieces have the elements of a tensor, in whichever order they were cut."""
    if sum(piece.numel() for piece in pieces) != whole.numel():
        return False
    together = torch.cat([piece.detach().cpu().flatten() for piece in pieces])
    own = whole.detach().cpu().flatten().to(together.dtype)
    return torch.equal(together.sort().values, own.sort().values)
