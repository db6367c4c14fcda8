"""What each rank's part of a step counts for, from what the ranks recorded of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distcheck.contract import Contract
from distcheck.records import LossName
from distcheck.training.traces.reader import StepHeader


def declared_factors(loss: LossName, sizes: Sequence[int]) -> tuple[float, ...]:
    """What a loss contract multiplies each rank's mean loss by."""
    total, world = sum(sizes), len(sizes)
    return tuple(
        {"mean": 1.0, "mean/world": 1 / world, "sum/global": size / total}[loss] for size in sizes
    )


@dataclass(frozen=True)
class Shares:
    """One step of the ranks with data, numbered from 0; `ranks` are their numbers in the report.

    `loss_scales` is what a GradScaler has multiplied each rank's loss by.
    """

    step: int
    ranks: tuple[int, ...]
    headers: tuple[StepHeader, ...]
    contract: Contract
    loss: LossName
    loss_scales: tuple[float, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank."""
        return tuple(len(header.ids) for header in self.headers)

    @property
    def samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.sizes)

    @property
    def weights(self) -> list[float]:
        """The ranks' sample weights n_r * W / N: 1.0 for equal shards."""
        return [size * len(self.sizes) / self.samples for size in self.sizes]

    @property
    def loss_factors(self) -> list[float]:
        """What the ranks' shard gradients are multiplied by: as the case declares, and as was
        seen of a strategy that promises nothing.
        """
        observed = self.contract.observes_loss
        return [
            factor * scale * (header.loss_factor if observed else 1.0)
            for factor, scale, header in zip(
                self.declared(self.loss), self.loss_scales, self.headers, strict=True
            )
        ]

    def declared(self, loss: LossName) -> tuple[float, ...]:
        """What a loss contract multiplies each rank's mean loss by."""
        return declared_factors(loss, self.sizes)

    @property
    def unscaled(self) -> list[float]:
        """What each rank's shard gradients must be divided by to be its mean loss's gradients."""
        found = zip(self.weights, self.loss_factors, self.loss_scales, strict=True)
        by_loss = self.contract.weighting == "loss"
        return [weight * scale if by_loss else factor for weight, factor, scale in found]

    @property
    def in_mean(self) -> list[float]:
        """What each rank's shard gradient counts for in the mean over all samples."""
        world = len(self.weights)
        if self.contract.weighting == "loss":
            return [1.0 / scale / world for scale in self.loss_scales]
        pairs = zip(self.weights, self.loss_factors, strict=True)
        return [weight / factor / world if factor else math.nan for weight, factor in pairs]

    @property
    def lost(self) -> str:
        """Says which ranks multiplied their loss by what no gradient comes back from; empty where
        none did.
        """
        factors = {
            rank: f"{factor:g}"
            for rank, factor in zip(self.ranks, self.unscaled, strict=True)
            if not factor or not math.isfinite(factor)
        }
        if not factors:
            return ""
        ranks = f"rank{'s' * (len(factors) > 1)} {', '.join(map(str, factors))}"
        by = " or ".join(dict.fromkeys(factors.values()))
        return f"the loss of {ranks} is multiplied by {by}, from which no gradient comes back"
