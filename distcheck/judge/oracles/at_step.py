"""One step of a recorded run, as the oracle layers start from it.

What several layers need (the ranks' own parts, the whole batch) is computed once, when the first of
them asks, and goes with the step. Checks are not given this: they get what the layers make of it.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from distcheck.judge.acceptance import Accepted, read
from distcheck.judge.oracles.forms import Gradients
from distcheck.judge.oracles.full_batch import FullBatch, module_scales
from distcheck.judge.oracles.own_rounding import OwnRounding
from distcheck.judge.oracles.shards import ShardResult, loss_scale
from distcheck.judge.oracles.shares import Shares
from distcheck.recordings.recording import Kind
from distcheck.records.expected_events import NotFinite

if TYPE_CHECKING:
    from distcheck.judge.oracles.references import References


class AtStep:
    """What the ranks did at `step`, computed again from what they recorded before it."""

    def __init__(self, references: "References", step: int) -> None:
        self.references, self.step = references, step
        self.ingredients, self.contract = references.ingredients, references.contract
        self.trace = references.trace
        self.case, self.training = self.ingredients.case, self.ingredients.training
        self.specs = self.trace.layout.model.parameters

    @cached_property
    def shares(self) -> Shares:
        """What each rank's part counts for."""
        ranks = range(self.trace.layout.world)
        return Shares(
            step=self.step,
            ranks=tuple(self.trace.ranks),
            headers=tuple(self.trace.header(rank, self.step) for rank in ranks),
            contract=self.contract,
            loss=self.contract.loss_given(self.case.loss),
            loss_scales=tuple(
                loss_scale(self.ingredients, self.trace, rank, self.step) for rank in ranks
            ),
        )

    @cached_property
    def shards(self) -> tuple[ShardResult, ...]:
        """Every rank's own part, computed again."""
        ranks = range(self.trace.layout.world)
        return tuple(self.references.shards.run(rank, self.step) for rank in ranks)

    @property
    def shard_gradients(self) -> tuple[Gradients, ...]:
        """What backward should have left on every rank."""
        return tuple(tuple(shard.gradients) for shard in self.shards)

    @property
    def computed_where_unseen(self) -> tuple[Gradients, ...]:
        """The same where the trace lacks some rank's local gradient; nothing where it has all."""
        trace, ranks = self.trace, range(self.trace.layout.world)
        seen = all(
            trace.tensor(rank, Kind.LOCAL_GRADIENT, self.step, index) is not None
            for index in range(len(self.specs))
            for rank in ranks
        )
        return () if seen else self.shard_gradients

    @cached_property
    def full_batch(self) -> FullBatch:
        """The whole batch in one process."""
        return self.references.full_batch.run(self.step)

    @cached_property
    def own_rounding(self) -> OwnRounding:
        """What rounding alone does to the whole batch in one process."""
        return OwnRounding(self.references.full_batch, self.step, self.full_batch)

    @cached_property
    def module_scales(self) -> dict[str, float]:
        """The largest gradient of the whole batch in each module, as an L2 norm."""
        return module_scales([spec.name for spec in self.specs], self.full_batch.gradients)

    @cached_property
    def in_double(self) -> "AtStep":
        """The same step in float64, from the state that was recorded."""
        return self.references.in_double.at(self.step)

    @property
    def accepted(self) -> Accepted | None:
        """What the case accepts."""
        return read(self.case.accept)

    @property
    def nan_is_expected(self) -> bool:
        """Whether the workload declares gradients that are not finite. In any other, a NaN shows
        that something went wrong before the exchange or in it, and compares as nothing.
        """
        return any(isinstance(event, NotFinite) for event in self.ingredients.must_happen)

    def recorded_gradients(self, index: int) -> list[torch.Tensor]:
        """What the ranks that must hold the mean held of one parameter, each bit pattern once."""
        whole, found = self.references.whole, dict[bytes, torch.Tensor]()
        for rank in self.references.holding:
            entry = whole.entry(rank, Kind.GRADIENT, self.step, index)
            tensor = whole.tensor(rank, Kind.GRADIENT, self.step, index)
            if tensor is not None:
                found.setdefault(entry.digest, tensor)
        return list(found.values())
