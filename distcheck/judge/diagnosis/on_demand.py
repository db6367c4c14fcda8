"""A step of a failed case, for the closer look: what should have been, computed when a cause is
asked for. Which questions are asked depends on the answers, so nothing is computed ahead, as it is
for checks (`judge/expecting.py`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from distcheck.contract import Contract
from distcheck.judge.oracles import any_order, whole_batch
from distcheck.judge.oracles.any_order import AnyOrder
from distcheck.judge.oracles.full_batch import FullBatch
from distcheck.judge.oracles.low_rank import Carried, Projected, project
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import ShardResult
from distcheck.judge.oracles.update import UpdateReference
from distcheck.machine.numerics import unit_roundoff
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import LossName
from distcheck.records.mesh import Mesh
from distcheck.training.building import Ingredients


class StepExpectation:
    """What should have been at `step`, given what the ranks recorded before it."""

    def __init__(self, references: References, step: int) -> None:
        self._references, self.step = references, step
        self._at = references.at(step)

    @property
    def ingredients(self) -> Ingredients:
        """The case's workload and samples."""
        return self._references.ingredients

    @property
    def contract(self) -> Contract:
        """What the strategy promises."""
        return self._references.contract

    @property
    def mesh(self) -> Mesh | None:
        """That of a model-parallel layout."""
        return self._references.mesh

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """How many the strategy's own backward cuts a batch into, the loop, and both together; none
        where there is one.
        """
        own, by_loop = self.contract.micro_batches, self.ingredients.training.accumulate
        return tuple(sorted({own, by_loop, own * by_loop} - {1}))

    @property
    def trace(self) -> TraceReader:
        """That of the ranks with data."""
        return self._references.trace

    @property
    def token_counts(self) -> dict[str, Any]:
        """The numbers of `StepFacts` where ranks count by tokens; nothing elsewhere."""
        shares = self._at.shares
        summed = shares.loss == "tokens"
        counted = all(header.tokens is not None for header in shares.headers)
        if not summed and not counted:
            return {}
        positions = tuple(header.positions for header in shares.headers) if counted else ()
        return {
            "samples": shares.sizes,
            "tokens": shares.counts,
            "positions": positions,
            "summed": summed,
        }

    @property
    def headers(self) -> Sequence[StepHeader]:
        """The ranks' headers."""
        return self._at.shares.headers

    @property
    def weights(self) -> list[float]:
        """The ranks' sample weights n_r * W / N: 1.0 for equal shards."""
        return self._at.shares.weights

    @property
    def unscaled(self) -> list[float]:
        """What each rank's shard gradients must be divided by to be its mean loss's gradients."""
        return self._at.shares.unscaled

    @property
    def lost(self) -> str:
        """Says which ranks multiplied their loss by what no gradient comes back from."""
        return self._at.shares.lost

    @property
    def shards(self) -> Sequence[ShardResult]:
        """Every rank's own part, computed again."""
        return self._at.shards

    def shard_from(self, rank: int, buffers_of: Sequence[int]) -> ShardResult:
        """A rank's part if each buffer had been that of another rank before the step."""
        return self._references.shards.run(rank, self.step, buffers_of=buffers_of)

    def shard_under_autocast(self, rank: int, dtype: torch.dtype) -> ShardResult:
        """A rank's part if the model had computed in a shorter dtype."""
        return self._references.shards.run(rank, self.step, autocast=dtype)

    def passes(self, rank: int) -> list[list[torch.Tensor | None]]:
        """What each of a rank's backward passes adds to its gradients."""
        return self._references.shards.passes(rank, self.step)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters as they were built: how they lie in memory, and which of them train."""
        return self._references.parameters

    @cached_property
    def _mean(self) -> AnyOrder:
        return any_order.mean_at(self._at)

    def interval(
        self, index: int, *, wire: str | None = None, loss: LossName | None = None
    ) -> Interval | None:
        """As `AnyOrder.interval`."""
        return self._mean.interval(index, wire=wire, loss=loss)

    @property
    def half_quanta(self) -> Sequence[float]:
        """As `quantum.half_quanta`; empty where quantising is not accepted."""
        return self._mean.half_quanta

    def carried(self, index: int) -> Carried | None:
        """What went into the exchange of one parameter where a low-rank one is accepted. Raises
        NotRecordedError.
        """
        return any_order.carried(self._at, index)

    def projected(self, result: torch.Tensor, given: Carried) -> Projected:
        """How one rank's result fits what went into its exchange."""
        assert self._at.accepted is not None
        unit, world = unit_roundoff(self.ingredients.dtype), len(self.weights)
        return project(result, given, rank=self._at.accepted.amount, world=world, unit=unit)

    @property
    def full_batch(self) -> FullBatch:
        """The whole batch in one process."""
        return self._at.full_batch

    def full_batch_tolerance(self, index: int) -> float:
        """The most by which a parameter's gradient may differ from the whole batch's, as an L2
        norm.
        """
        return whole_batch.tolerance(self._at, index)

    @property
    def update(self) -> UpdateReference:
        """The optimizer's step, again, for any rank."""
        return self._references.update

    def at(self, step: int) -> "StepExpectation":
        """What is expected at another step."""
        return self if step == self.step else StepExpectation(self._references, step)
