"""What a check gets to see."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from distcheck.contract import Contract
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.records import Case
from distcheck.training.building import Ingredients
from distcheck.training.traces.layout import Kind
from distcheck.training.traces.reader import Entry, TraceReader


@dataclass(frozen=True)
class Evidence:
    """A trace, what is expected at each step to judge, and the rerun's trace if there is one.

    Expectations number the ranks that have data from 0; where every rank has, that is their rank.
    """

    ingredients: Ingredients
    contract: Contract
    trace: TraceReader
    expectations: Sequence[StepExpectation]
    rerun: TraceReader | None = None

    @property
    def case(self) -> Case:
        """The case that was run."""
        return self.ingredients.case

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.trace.layout.world)

    @property
    def with_data(self) -> tuple[int, ...]:
        """The ranks that read a shard, in the order of the expectations' lists."""
        return self.case.with_data

    @cached_property
    def holding(self) -> tuple[int, ...]:
        """The ranks that must hold the mean gradient: those with data, and of those without the
        ones whose gradients of zero were ever made something else. A server that keeps the mean
        must hold the right one, one that only hands it on has nothing to compare.
        """
        without = [rank for rank in self.ranks if rank not in self.with_data]
        return tuple(sorted([*self.with_data, *filter(self._ever_held, without)]))

    def _ever_held(self, rank: int) -> bool:
        count = len(self.trace.layout.model.parameters)
        return any(
            tensor is not None and bool(tensor.any())
            for step in range(self.trace.steps_written())
            for tensor in (
                self.trace.tensor(rank, Kind.GRADIENT, step, index) for index in range(count)
            )
        )


@dataclass(frozen=True)
class Recorded:
    """One slot of one rank, as a check meets it."""

    entry: Entry
    _read: Callable[[], torch.Tensor | None]

    @cached_property
    def tensor(self) -> torch.Tensor | None:
        """The tensor, mapped when it is asked for: the digest may do."""
        return self._read()


def recorded(trace: TraceReader, rank: int, kind: Kind, slot: int, index: int) -> Recorded:
    """What a rank recorded in a slot."""
    entry = trace.entry(rank, kind, slot, index)
    return Recorded(entry, partial(trace.tensor, rank, kind, slot, index))
