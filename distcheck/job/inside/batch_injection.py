"""Replaces a script's batches, inputs, targets and RNG states by the recorded ones of the ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.batch_source import ALL, BatchSource, NotTogetherError, Pairs, are_of
from distcheck.job.inside.contents import compare_reread_samples
from distcheck.job.inside.loaders import Loaders
from distcheck.job.settings import BY_RANK, IN_TURN, JobSettings, SampleComparison
from distcheck.recordings.jobs.reading import JobRecording


class BatchInjector:
    """Position of a replay, and the data for it. `copy` is the role of this process if it is a
    copy. `fails` ends the replay if the recording does not fit the script.
    """

    def __init__(
        self, job: JobRecording, settings: JobSettings, fails: Callable[[str], NoReturn]
    ) -> None:
        self._job, self._fails, self._owns = job, fails, settings.own_inputs
        self.batch_source = BatchSource(job)
        self._loaders = Loaders()
        self.copy, self.mode = settings.task, settings.task_mode
        self.reads: list[SampleComparison] = []
        self.divides = False
        self.step = 0
        self.begin_step()

    def begin_step(self) -> None:
        self.passes = 0  # forward passes of the step
        self._calls = 0  # losses since the last forward pass
        self._before_backward = 0  # losses since the last backward pass
        self._passes_before = 0  # forward passes before that backward pass
        self._injects = False  # a batch of a loader
        self.has_own_order = False  # inputs with the recorded rows in another order

    def computes_loss(self) -> None:
        self._calls += 1
        self._before_backward += 1

    def begins_backward(self) -> None:
        """Assign losses that follow to the next backward pass."""
        self._before_backward, self._passes_before = 0, self.passes

    @property
    def makes_one(self) -> bool:
        """True if this copy currently runs several passes as one batch."""
        copy = self.copy
        return copy is not None and copy.step == self.step and bool(copy.pairs)

    def source(self, number: int) -> Pairs:
        """Return the ranks and passes whose recorded inputs replace the inputs of the
        script now.
        """
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
        """Return True if the epoch of a rank ended at this position."""
        place = self._loaders.place_of(iterator)
        if place is None or place[0] not in self.batch_source.lengths:
            return False
        times = self._job.world if self.mode == IN_TURN else 1
        return place[2] >= self.batch_source.lengths[place[0]] * times

    def batch(self, iterator: Any, batch: Any) -> None:
        """Overwrite the script's batch with the recorded one, and set the RNG states after it."""
        place, _ = self._loaders.next_place(iterator)
        if place is None:
            return
        loader = self._loaders.datasets.pop(place[0], None)
        if loader is not None and self.copy is None:
            self.reads += compare_reread_samples(self._job, place[0], loader)
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
            self._overwrite("a batch", tensors.leaves(batch), leaves)
            self._injects = True
        self.set_random_streams(origin=True)

    def inputs(self, args: Any, kwargs: Any) -> None:
        """Overwrite the inputs of the starting pass with the recorded ones, and set RNG states."""
        found = self._together(self.batch_source.inputs, self.step, self.source(self.passes))
        self.set_random_streams(origin=False)
        own = tensors.inputs_of((args, kwargs))
        for place, tensor in enumerate(own):
            pieces = self.batch_source.pieces(self.step, self.source(self.passes), place)
            if pieces and not are_of(pieces, tensor):
                self._fails(
                    f"step {self.step}: the ranks' sequence shards do not match the model inputs "
                    "of the script in a single process; read batches from a DataLoader"
                )
        if self._owns and not self._are_recorded_elements(own):
            self._fails(
                f"step {self.step}: the inputs that the script makes in a single process are other "
                "samples; have it read its batches from a DataLoader"
            )
        self.passes, self._calls = self.passes + 1, 0
        if not self._owns:
            pairs = zip(own, found, strict=False)
            self.has_own_order = self._injects and any(
                g is not None and _are_permuted(t, g) for t, g in pairs
            )
            self._overwrite("the model", own, found)

    def target(self, computed: torch.Tensor, target: Any) -> None:
        """Overwrite the target of a loss with the recorded target, if that fits the prediction."""
        if self.passes == 0 or self._owns or not isinstance(target, torch.Tensor):
            return
        if target.requires_grad:
            return
        pairs, call = self.source(self.passes - 1), self._calls
        if self.mode != IN_TURN and not self.makes_one:
            noted = self.batch_source.noted_with(self.step, self._passes_before, self.passes - 1)
            if noted is not None:
                pairs, call = [(rank, noted) for rank, _ in pairs], self._before_backward
        found = self._together(self.batch_source.target, self.step, pairs, call)
        if found is None or found.dtype != target.dtype:
            return
        if self.has_own_order and _are_permuted(target, found):
            return
        if found.shape == target.shape or found.shape[:1] == computed.shape[:1]:
            tensors.replace_data(target, found)

    def set_random_streams(self, *, origin: bool) -> None:
        """Set the RNG states of the next forward pass, in a process that replays one rank."""
        pairs = self.source(self.passes)
        if len(pairs) == 1 and self.batch_source.has(self.step, pairs):
            tensors.set_random_state(self.batch_source.random(self.step, pairs[0], origin=origin))

    def _together(self, take: Any, *given: Any, **named: Any) -> Any:
        try:
            return take(*given, **named)
        except NotTogetherError as error:
            self._fails(f"step {self.step}: {error}")

    def _overwrite(
        self, what: str, own: Sequence[torch.Tensor], given: Sequence[torch.Tensor | None]
    ) -> None:
        """Overwrite the script's tensors with recorded ones; end the replay on a mismatch."""
        if len(own) != len(given):
            self._fails(
                f"step {self.step}: {what} had {len(given)} tensors on a rank, but {len(own)} in "
                "a single process"
            )
        for tensor, recorded in zip(own, given, strict=True):
            if recorded is None or _is_a_count(recorded, tensor):
                continue
            if not (self.has_own_order and _are_permuted(tensor, recorded)):
                tensors.replace_data(tensor, recorded)

    def _are_recorded_elements(self, own: Sequence[torch.Tensor]) -> bool:
        """Return True if the inputs have the same elements as those recorded for this pass on one
        rank, or on all ranks together. In the second case, each rank gave its model a part of the
        same samples (`divides`).
        """
        number = self.source(self.passes)[0][1]
        for pairs in (self.source(self.passes), self.batch_source.pairs(number, ALL)):
            self.divides = len(pairs) > len(self.source(self.passes))
            parts = [self.batch_source.inputs(self.step, [pair]) for pair in pairs]
            if {len(one) for one in parts} != {len(own)}:
                continue
            if all(map(_is_of, zip(*parts, strict=True), own)):
                return True
        return False


def _are_permuted(own: torch.Tensor, recorded: torch.Tensor) -> bool:
    """Return True if the script has the recorded rows in another order. This happens with two views
    of each sample: the ranks' inputs are [a, a', b, b'], but a single process makes [a, b, a', b'].
    """
    recorded = recorded.to(own.device)
    alike = own.dim() > 0 and (own.shape, own.dtype) == (recorded.shape, recorded.dtype)
    if not alike or torch.equal(own, recorded):
        return False
    rows = (Counter(tensors.digests_of_samples([one])) for one in (own, recorded))
    return next(rows) == next(rows)


def _is_a_count(recorded: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True for an integer in a batch that counts samples or targets, so that a single
    process has another value. (Hugging Face's Trainer passes num_items_in_batch to the model.)
    """
    return recorded.dim() == tensor.dim() == 0 and float(recorded).is_integer()


def _is_of(parts: Sequence[torch.Tensor | None], tensor: torch.Tensor) -> bool:
    known = [part for part in parts if part is not None]
    return not known or _is_a_count(known[0], tensor) or are_of(known, tensor)
