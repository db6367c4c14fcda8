"""A run as events are looked for in it (`purpose.py`): what each rank had of its own."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import nn

from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.sensitivity import own_gradients
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.records import TensorSpec
from distcheck.training.traces.layout import Kind

Own = list[torch.Tensor | None]  # each rank's own gradient of one parameter at one step


class Recording:
    """A run as events are looked for in it: ranks with data only, numbered from 0."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence, self.case = evidence, evidence.case
        self.ingredients = evidence.ingredients
        self.steps: Sequence[StepExpectation] = evidence.expectations
        self.trace = evidence.trace.of_ranks(evidence.with_data)
        self.ranks = range(len(evidence.with_data))
        self._own: dict[tuple[int, int], Own] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The parameters."""
        return self.trace.layout.model.parameters

    def own(self, expectation: StepExpectation, index: int) -> Own:
        """What backward left on each rank."""
        place = (expectation.step, index)
        if place not in self._own:
            self._own[place] = own_gradients(expectation, index)
        return self._own[place]

    def named(self, parameter: str) -> Iterator[tuple[int, Own]]:
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

    @cached_property
    def model(self) -> nn.Module:
        """A model of the workload's own, for what its structure says."""
        return self.ingredients.model()


def holds_any(gradient: torch.Tensor | None) -> bool:
    """Whether it is there, and not zero everywhere."""
    return gradient is not None and bool(gradient.any())


def all_there(own: Own) -> bool:
    """Whether every rank has a gradient."""
    return all(gradient is not None for gradient in own)
