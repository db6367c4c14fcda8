"""Rank weights of a step, from the ranks' recording."""

import math
from dataclasses import dataclass
from functools import cached_property

from distcheck.contract import Contract
from distcheck.recordings.traces.header import StepHeader
from distcheck.records import LossName


def declared_factor(loss: LossName, size: int, total: int, world: int) -> float:
    """Return the factor that a loss contract applies to a rank's mean loss, over `size` samples (or
    tokens) of `total`. A rank without tokens has loss 0 with any factor.
    """
    return {
        "mean": 1.0,
        "mean/world": 1 / world,
        "sum/global": size / max(1, total),
        "tokens": float(max(1, size)),
    }[loss]


@dataclass(frozen=True)
class Shares:
    """Rank weights at one step, for the ranks with data, numbered from 0.

    `ranks` are the numbers of the ranks in the report. `loss_scales` are the ranks' GradScaler
    scales. Derived values are cached, since a judge needs them for every parameter and rank.
    """

    step: int
    ranks: tuple[int, ...]
    headers: tuple[StepHeader, ...]
    contract: Contract
    loss: LossName
    loss_scales: tuple[float, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(header.ids) for header in self.headers)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of samples (or tokens, if they are counted) in each rank's mean loss."""
        return tuple(header.loss_count for header in self.headers)

    @cached_property
    def samples(self) -> int:
        return sum(self.sizes)

    @cached_property
    def weights(self) -> list[float]:
        """The rank weights n_r * W / N, by samples or tokens: 1.0 for equal shards."""
        total = max(1, sum(self.counts))
        return [count * len(self.counts) / total for count in self.counts]

    @cached_property
    def sample_weights(self) -> list[float]:
        """The rank weights by samples, as in `Step.weight`."""
        return [size * len(self.sizes) / self.samples for size in self.sizes]

    @cached_property
    def loss_factors(self) -> list[float]:
        """Factors of the ranks' shard gradients: declared, or observed without a promise."""
        observed = self.contract.observes_loss
        return [
            factor * scale * (header.loss_factor if observed else 1.0)
            for factor, scale, header in zip(
                self.declared(self.loss), self.loss_scales, self.headers, strict=True
            )
        ]

    def declared(self, loss: LossName) -> tuple[float, ...]:
        """Return the factor that a loss contract applies to each rank's mean loss."""
        counts = self.counts
        return tuple(declared_factor(loss, n, sum(counts), len(counts)) for n in counts)

    @cached_property
    def unscaled(self) -> list[float]:
        """The divisors that turn shard gradients into those of mean losses."""
        found = zip(self.sample_weights, self.loss_factors, self.loss_scales, strict=True)
        by_loss = self.contract.weighting == "loss"
        return [weight * scale if by_loss else factor for weight, factor, scale in found]

    @cached_property
    def mean_weights(self) -> list[float]:
        """The weight of each rank's shard gradient in the mean over all samples or tokens."""
        world = len(self.weights)
        if self.contract.weighting == "loss":
            found = zip(self.weights, self.sample_weights, self.loss_scales, strict=True)
            return [weight / by_samples / scale / world for weight, by_samples, scale in found]
        pairs = zip(self.weights, self.loss_factors, strict=True)
        return [weight / factor / world if factor else math.nan for weight, factor in pairs]

    @cached_property
    def lost(self) -> str:
        """Describe the ranks whose loss factor lets no gradient come back, or return ""."""
        factors = {
            rank: f"{factor:g}"
            for rank, factor in zip(self.ranks, self.unscaled, strict=True)
            if not factor or not math.isfinite(factor)
        }
        if not factors:
            return ""
        ranks = f"rank{'s' * (len(factors) > 1)} {', '.join(map(str, factors))}"
        by = " or ".join(dict.fromkeys(factors.values()))
        return f"the loss of {ranks} is multiplied by {by}, so no gradient flows back"
