"""What a check gets to see."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.contract import Contract
from distcheck.oracles.expectation import StepExpectation
from distcheck.ranks.training import Ingredients
from distcheck.records import Case
from distcheck.traces.layout import Kind, State
from distcheck.traces.reader import TraceReader


@dataclass(frozen=True)
class Evidence:
    """A trace, what is expected at each step to judge, and the rerun's trace if there is one."""

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


@dataclass(frozen=True)
class Recorded:
    """One slot of one rank, as a check meets it."""

    state: State
    digest: bytes
    tensor: torch.Tensor | None


def recorded(trace: TraceReader, rank: int, kind: Kind, slot: int, index: int) -> Recorded:
    """What a rank recorded in a slot."""
    entry = trace.entry(rank, kind, slot, index)
    return Recorded(entry.state, entry.digest, trace.tensor(rank, kind, slot, index))
