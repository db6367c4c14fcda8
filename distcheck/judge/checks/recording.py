"""A run as events are looked for in it (`purpose.py`): what each rank had of its own."""

from collections.abc import Iterator

import torch

from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.oracles.forms import Gradients, OwnStep
from distcheck.recordings.recording import Kind
from distcheck.records import TensorSpec


class RunOfEvents:
    """A run as events are looked for in it: ranks with data only, numbered from 0."""

    def __init__(self, evidence: Evidence) -> None:
        self.case, self.training = evidence.case, evidence.training
        self.steps = evidence.expectations
        self.trace = evidence.trace.of_ranks(evidence.with_data)
        self.ranks = range(len(evidence.with_data))

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self.trace.layout.model.parameters

    @property
    def as_prepared(self) -> list[OwnStep]:
        return [expectation.what for expectation in self.steps]

    def own(self, expectation: Expectation, index: int) -> Gradients:
        found: OwnStep = expectation.what
        return found.own[index]

    def named(self, parameter: str) -> Iterator[tuple[int, Gradients]]:
        """(step, own gradients) of one parameter."""
        names = [spec.name for spec in self.specs]
        for expectation in self.steps if parameter in names else ():
            yield expectation.step, self.own(expectation, names.index(parameter))

    def exchanged(self, index: int) -> bool:
        """Whether every rank had a gradient of a parameter at some step, not all of them zero."""
        owns = (self.own(expectation, index) for expectation in self.steps)
        return any(all_there(own) and any(holds_any(g) for g in own) for own in owns)

    def buffers(self, name: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(step, before, after) of a buffer, on every rank."""
        names = [spec.name for spec in self.trace.layout.model.buffers]
        for expectation in self.steps if name in names else ():
            for rank in self.ranks:
                at = (names.index(name),)
                before = self.trace.tensor(rank, Kind.BUFFER, expectation.step, *at)
                after = self.trace.tensor(rank, Kind.BUFFER, expectation.step + 1, *at)
                if before is not None and after is not None:
                    yield expectation.step, before, after


def holds_any(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


def all_there(own: Gradients) -> bool:
    return all(gradient is not None for gradient in own)
