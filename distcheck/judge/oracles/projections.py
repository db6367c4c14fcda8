"""The design `--accept low-rank`: projections of the mean and the remainders of earlier steps
(`low_rank.py`), from the recorded gradients.
"""

from dataclasses import dataclass

import torch

from distcheck.judge.oracles import low_rank
from distcheck.judge.oracles.compression import CompressedForm
from distcheck.judge.oracles.design import Design
from distcheck.judge.oracles.forms import GradientForms, Limit
from distcheck.judge.oracles.low_rank import Projection
from distcheck.judge.oracles.references import AtStep
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.rounding_bound import EarlierMeans, RoundingBound, mean_of_step
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import unit_roundoff
from distcheck.recordings.recording import Kind


@dataclass(frozen=True)
class CompressedForms(GradientForms):
    """Expectations of a step if gradients are compressed."""

    compresses = True
    mean: RoundingBound
    inputs: tuple[CompressedForm | None, ...]

    def of(self, index: int) -> CompressedForm | None:
        return self.inputs[index]

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        return self.mean.limit(index, own)


def earlier_results(at: AtStep, index: int) -> list[tuple[Interval, torch.Tensor]]:
    """Return mean and result of a gradient at every earlier step. Raises NotRecordedError."""
    found = []
    for step in range(at.step):
        before = at.references.kept(EarlierMeans).of_step(step)[index]
        result = at.trace.tensor(0, Kind.GRADIENT, step, index)
        if before is None or result is None:
            raise NotRecordedError(f"rank 0 has no gradient number {index} at step {step}")
        found.append((before, result))
    return found


class LowRank(Design):
    """Low-rank compression with or without error feedback."""

    def gradients(self, at: AtStep) -> CompressedForms:
        mean = mean_of_step(at)
        found = tuple(
            self._projection(at, index, mean.interval(index)) for index in range(len(at.specs))
        )
        return CompressedForms(
            at.shares, mean.computed, mean=mean, inputs=found, opening=at.shares.lost
        )

    def _projection(self, at: AtStep, index: int, now: Interval | None) -> Projection | None:
        """Return the input of one parameter's compression. Raises NotRecordedError."""
        if now is None:
            return None
        earlier = [] if self.accepted["dropped"] else earlier_results(at, index)
        unit, world = unit_roundoff(at.ingredients.dtype), at.trace.layout.world
        rank = self.accepted.number("rank")
        return low_rank.compression_input(now, earlier, rank=rank, unit=unit, world=world)
