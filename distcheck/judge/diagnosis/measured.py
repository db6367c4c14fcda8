"""A parameter of a failed step, as tensors."""

from dataclasses import dataclass
from functools import cached_property

import torch

from distcheck.judge.diagnosis.on_demand import StepExpectation
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.machine.numerics import wide
from distcheck.recordings.recording import Kind


@dataclass(frozen=True)
class Measured:
    """A parameter at one step. Its tensors, in float64, are made when asked for: a large model's
    would not fit all at once; complex numbers are pairs of real ones. Intervals are kept in `kept`,
    if there is one.
    """

    expectation: StepExpectation
    index: int
    name: str
    elements: int
    wrong: tuple[int, ...]
    kept: dict[int, Interval] | None

    @property
    def interval(self) -> Interval:
        """The mean, and how far a right result may be from it."""
        if self.kept is not None and self.index in self.kept:
            return self.kept[self.index]
        found = self.expectation.interval(self.index)
        assert found is not None
        if self.kept is not None:
            self.kept[self.index] = found
        return found

    @property
    def world(self) -> int:
        """How many ranks have data."""
        return len(self.expectation.weights)

    @property
    def shares(self) -> list[float]:
        """What each rank's gradient, as backward leaves it, counts for in the mean."""
        world = len(self.expectation.weights)
        pairs = zip(self.expectation.weights, self.expectation.unscaled, strict=True)
        return [weight / world / factor for weight, factor in pairs]

    def left(self, rank: int) -> torch.Tensor:
        """What backward should have left on a rank."""
        gradient = self.expectation.shards[rank].gradients[self.index]
        if gradient is None:
            return torch.zeros_like(self.interval.mean)
        return wide(gradient)

    def shard(self, rank: int) -> torch.Tensor:
        """The gradient of a rank's mean loss, whatever was done to that loss."""
        return self.left(rank) / self.expectation.unscaled[rank]

    def result(self, rank: int) -> torch.Tensor:
        """What a rank held after the sync."""
        found = self.expectation.trace.tensor(
            rank, Kind.GRADIENT, self.expectation.step, self.index
        )
        assert found is not None
        return wide(found)


@dataclass(frozen=True)
class Given(Measured):
    """The same, by what backward was seen to leave in place of what it should have left: what an
    exchange made of that is the exchange's doing, whatever went wrong before.
    """

    @cached_property
    def interval(self) -> Interval:
        """The mean of what was left."""
        parts = [self._left_on(rank) for rank in range(len(self.expectation.weights))]
        return interval(parts, self.shares, rescaled=True)

    def left(self, rank: int) -> torch.Tensor:
        """What backward was seen to leave on a rank."""
        return wide(self._left_on(rank))

    def _left_on(self, rank: int) -> torch.Tensor:
        found = self.expectation.trace.tensor(
            rank, Kind.LOCAL_GRADIENT, self.expectation.step, self.index
        )
        if found is not None:
            return found
        spec = self.expectation.trace.layout.model.parameters[self.index]
        return torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
