"""Expectations of accepted designs (`--accept`) whose results are not the mean gradient.

A row of `judge/designs.py` names a subclass. It is created once per case, from the references of
all steps, and may keep results of earlier steps. `Design` replaces the expected gradients.
`ParameterDesign` is for designs in which each rank steps by its local gradients, bitwise, and
parameters are combined after some steps. Then the following is checked:

    gradients    bitwise, those of each rank's shard (unless `warms_up`: their mean)
    parameters   bitwise, each rank's own update, unless the tensor is combined after this step
    parameters   rounding: a combination of all ranks' updates (`Combination`), otherwise
    agreement    within the groups of ranks that must hold the same parameters (`agreeing`)

Updates are computed from each rank's recording before and during the step, so a combination that is
missing, late, or of other ranks appears at the step where it happens.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from distcheck.judge.acceptance import AcceptedDeviation
from distcheck.judge.oracles.forms import Combination, GradientForms
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader

Updates = Sequence[Mapping[Kind, Sequence[torch.Tensor | None]]]  # of each rank
UpdatesAt = Callable[[int], Updates]
Expected = Callable[[Kind, int], Sequence[Combination | None]]
Mistake = tuple[str, Expected]


class Design:
    """What an accepted deviation promises. `accepted` has its settings."""

    def __init__(self, references: Any, accepted: AcceptedDeviation) -> None:
        self.references, self.accepted, self.trace = references, accepted, references.trace

    def gradients(self, at: Any) -> GradientForms | None:
        """Return the expected gradients of a step under layer rounding; None for their mean.
        Raises NotBoundedError, NotRecordedError.
        """
        return None

    def gradient_mistakes(self, at: Any) -> Iterator[tuple[str, GradientForms]]:
        """Yield mistakes in words, with the gradients of a step that they would cause."""
        yield from ()


def make_design(references: Any, accepted: AcceptedDeviation | None) -> Design | None:
    if accepted is None or not accepted.kind.oracle:
        return None
    module, _, name = accepted.kind.oracle.partition(":")
    kind: type[Design] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return kind(references, accepted)


class ParameterDesign(Design):
    """A design in which ranks step locally, and combine parameters after some steps."""

    def warms_up(self, step: int) -> bool:
        """Return True if gradients are still averaged at this step."""
        return False

    def combines(self, step: int, kind: Kind, index: int) -> bool:
        """Return True if a tensor is combined after the step."""
        raise NotImplementedError

    def tensors_at(self, step: int) -> list[tuple[Kind, int]]:
        """Return the tensors that are combined after the step."""
        return [
            (kind, index)
            for kind in (Kind.PARAMETER, Kind.OPTIMIZER)
            for index in range(len(self.trace.layout.specs(kind)))
            if self.combines(step, kind, index)
        ]

    def combined(
        self, step: int, kind: Kind, index: int, updates: Updates
    ) -> Sequence[Combination | None]:
        """Return the expected tensor of each rank; None if it must be absent."""
        raise NotImplementedError

    def agreeing(self, step: int, index: int) -> Sequence[Sequence[int]]:
        """Return groups of ranks that must hold the same parameter after the step."""
        raise NotImplementedError

    def remark(self) -> str:
        """Return a sentence for the report about settings that were found, or ""."""
        return ""

    @classmethod
    def candidates(cls, references: Any, updates_at: UpdatesAt) -> Iterator[str]:
        """Yield acceptances that a recording may fit, the simplest first."""
        return iter(())

    def wrong_combinations(self, step: int, updates: Updates) -> Iterator[Mistake]:
        """Yield wrong combinations that are known, each with its description."""
        return iter(())

    def fits(self, updates_at: UpdatesAt) -> bool:
        """Return True if parameters and optimizer state are those of the design after every step,
        and one of the combinations changed a rank's tensor: code that exchanges nothing fits every
        design that combines nothing.
        """
        changed = False
        for step in range(self.trace.steps_written()):
            updates, combined = updates_at(step), set(self.tensors_at(step))
            expected = partial(self.combined, step, updates=updates)
            if not self._has_updates(step, updates, combined):
                return False
            if not self.has_combined(step, expected):
                return False
            changed = changed or any(
                not _same_bits(own[kind][index], self.trace.tensor(rank, kind, step + 1, index))
                for kind, index in combined
                for rank, own in enumerate(updates)
            )
        return changed

    def _has_updates(
        self, step: int, updates: Updates, combined: Collection[tuple[Kind, int]]
    ) -> bool:
        """Return True if tensors that are not combined are those of each rank's own update."""
        return all(
            _same_bits(tensor, self.trace.tensor(rank, kind, step + 1, index))
            for rank, own in enumerate(updates)
            for kind, tensors in own.items()
            for index, tensor in enumerate(tensors)
            if (kind, index) not in combined
        )

    def has_combined(self, step: int, expected: Expected) -> bool:
        """Return True if all tensors that are combined after a step are the expected ones."""
        for kind, index in self.tensors_at(step):
            for rank, one in enumerate(expected(kind, index)):
                held = self.trace.tensor(rank, kind, step + 1, index)
                if one is None or held is None:
                    if one is not held:
                        return False
                elif bool(((as_float64(held) - one.found.mean).abs() > one.found.bound).any()):
                    return False
        return True


def _same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def agree_bitwise(
    trace: TraceReader, slot: int, ranks: Sequence[int], indices: Sequence[int] | None = None
) -> bool:
    """Return True if ranks hold the same parameters (or those of `indices`), bitwise."""
    for index in range(len(trace.layout.model.parameters)) if indices is None else indices:
        entries = [trace.entry(rank, Kind.PARAMETER, slot, index) for rank in ranks]
        if any(e.state is not EntryState.STORED or e.digest != entries[0].digest for e in entries):
            return False
    return True
