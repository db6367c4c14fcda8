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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from distcheck.judge.acceptance import AcceptedDeviation
from distcheck.judge.oracles.forms import Combination, GradientForms
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader

Updates = Sequence[Mapping[Kind, Sequence[torch.Tensor | None]]]  # of each rank


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


def agree_bitwise(
    trace: TraceReader, slot: int, ranks: Sequence[int], indices: Sequence[int] | None = None
) -> bool:
    """Return True if ranks hold the same parameters (or those of `indices`), bitwise."""
    for index in range(len(trace.layout.model.parameters)) if indices is None else indices:
        entries = [trace.entry(rank, Kind.PARAMETER, slot, index) for rank in ranks]
        if any(e.state is not EntryState.STORED or e.digest != entries[0].digest for e in entries):
            return False
    return True
