"""A failed step, and a parameter of it, as tensors: what should have been, computed when a cause is
asked for. Which questions are asked depends on the answers, so nothing is computed ahead, as it is
for checks.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from distcheck.judge.diagnosis.step_view import StepView
from distcheck.judge.oracles import rounding_bound
from distcheck.judge.oracles.references import AtStep
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import wide
from distcheck.recordings.recording import Kind
from distcheck.records import LossName

T = TypeVar("T")


class StepExpectation(AtStep, StepView):
    """What should have been at a step, computed again from what the ranks of a case recorded."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.trace.ranks

    @property
    def weights(self) -> Sequence[float]:
        return self.shares.weights

    @property
    def unscaled(self) -> Sequence[float]:
        return self.shares.unscaled

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def wire(self) -> str | None:
        return self.contract.wire

    @property
    def lost(self) -> str:
        return self.shares.lost

    def loss_factor(self, rank: int) -> float:
        return 1.0 if self.contract.weighting == "loss" else self.unscaled[rank]

    def local(self, rank: int, index: int) -> torch.Tensor | None:
        return self.shards[rank].gradients[index]

    def seen(self, rank: int, index: int) -> torch.Tensor | None:
        return self.trace.tensor(rank, Kind.LOCAL_GRADIENT, self.step, index)

    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        return self.trace.tensor(rank, Kind.GRADIENT, self.step, index)

    def digest(self, rank: int, index: int) -> bytes:
        return self.trace.entry(rank, Kind.GRADIENT, self.step, index).digest

    def interval(
        self, index: int, *, wire: str | None = None, loss: LossName | None = None
    ) -> Interval | None:
        """As `RoundingBound.interval`."""
        return rounding_bound.mean_at(self).interval(index, wire=wire, loss=loss)

    def unmoved(self) -> tuple[int, ...]:
        """Ranks that an update computed again moves, and whose parameters stayed to the bit."""
        trace, step, found = self.trace, self.step, []
        indices = range(len(self.specs))
        for rank in range(len(self.weights)):
            before, after = (
                [trace.entry(rank, Kind.PARAMETER, slot, i).digest for i in indices]
                for slot in (step, step + 1)
            )
            held = [self.reduced(rank, i) for i in indices]
            if before != after or not any(h is not None and bool(h.any()) for h in held):
                continue
            try:
                moved = self.references.update.run(rank, step)[Kind.PARAMETER]
            except NotRecordedError:
                continue
            stayed = [trace.tensor(rank, Kind.PARAMETER, step, i) for i in indices]
            if any(
                a is not None and b is not None and not torch.equal(a, b)
                for a, b in zip(moved, stayed, strict=True)
            ):
                found.append(rank)
        return tuple(found)

    @property
    def half_quanta(self) -> Sequence[float]:
        """How far quantizing may move each rank's elements; empty where it is not accepted."""
        return rounding_bound.mean_at(self).half_quanta

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """How many the strategy's own backward cuts a batch into, the loop, and both together; none
        where there is one.
        """
        own, by_loop = self.contract.micro_batches, self.training.accumulate
        return tuple(sorted({own, by_loop, own * by_loop} - {1}))

    @property
    def token_counts(self) -> dict[str, Any]:
        """The numbers of `StepFacts` where ranks count by tokens; nothing elsewhere."""
        shares = self.shares
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


@dataclass(frozen=True, eq=False)
class Measured:
    """A parameter at one step. Its tensors, in float64, are made when asked for, and stay if their
    name is in `keeps` (a large model's would not fit all at once); complex numbers are pairs of
    real ones.
    """

    view: StepView
    index: int
    name: str
    elements: int
    keeps: Container[str]
    _kept: dict[tuple[str, int], Any] = field(default_factory=dict, init=False)

    @property
    def interval(self) -> Interval:
        """The mean, and how far a right result may be from it."""
        return self._keep("interval", 0, self._mean)

    @cached_property
    def wrong(self) -> tuple[int, ...]:
        """The ranks whose result is further from the mean than that."""
        mean, bound = self.interval.mean, self.interval.bound
        ranks = range(self.world)
        return tuple(r for r in ranks if not bool(((self.result(r) - mean).abs() <= bound).all()))

    @property
    def world(self) -> int:
        return len(self.view.weights)

    @property
    def shares(self) -> list[float]:
        """What each rank's gradient, as backward leaves it, counts for in the mean."""
        pairs = zip(self.view.weights, self.view.unscaled, strict=True)
        return [weight / self.world / factor for weight, factor in pairs]

    def left(self, rank: int) -> torch.Tensor:
        return self._keep("left", rank, lambda: self._left(rank))

    def shard(self, rank: int) -> torch.Tensor:
        """The gradient of a rank's mean loss, whatever was done to that loss."""
        return self._keep("shard", rank, lambda: self.left(rank) / self.view.unscaled[rank])

    def result(self, rank: int) -> torch.Tensor:
        return self._keep("result", rank, lambda: self._result(rank))

    def by_what_was_left(self) -> "Given":
        """The same, as `Given`."""
        return Given(self.view, self.index, self.name, self.elements, self.keeps)

    def _keep(self, name: str, rank: int, make: Callable[[], T]) -> T:
        if name not in self.keeps:
            return make()
        if (name, rank) not in self._kept:
            self._kept[name, rank] = make()
        found: T = self._kept[name, rank]
        return found

    def _mean(self) -> Interval:
        found = self.view.interval(self.index)
        assert found is not None
        return found

    def _left(self, rank: int) -> torch.Tensor:
        gradient = self.view.local(rank, self.index)
        if gradient is None:
            return torch.zeros_like(self.interval.mean)
        return wide(gradient)

    def _result(self, rank: int) -> torch.Tensor:
        found = self.view.reduced(rank, self.index)
        assert found is not None
        return wide(found)


class Given(Measured):
    """The same, by what backward was seen to leave in place of what it should have left: what an
    exchange made of that is the exchange's doing, whatever went wrong before.
    """

    def _mean(self) -> Interval:
        parts = [self._left_on(rank) for rank in range(self.world)]
        return interval(parts, self.shares, rescaled=True)

    def _left(self, rank: int) -> torch.Tensor:
        return wide(self._left_on(rank))

    def _left_on(self, rank: int) -> torch.Tensor:
        found = self.view.seen(rank, self.index)
        if found is not None:
            return found
        spec = self.view.specs[self.index]
        return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
