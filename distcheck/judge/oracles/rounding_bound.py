"""The rounding bound: the mean of the ranks' own gradients, in any order of summation.

The formula is in `rounding.py`. Here is what goes into it at a step: what each rank's gradient
counts for, how often it is rounded, and what `--accept` widens (`quantum.py`, `low_rank.py`). Under
`--accept local-sgd` it is the mean of parameters (`averaging.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distcheck.judge.acceptance import Accepted
from distcheck.judge.oracles import low_rank, quantum, rounding, unpromised
from distcheck.judge.oracles.forms import (
    Averaged,
    Either,
    GradientForms,
    Gradients,
    Limit,
    Near,
    Within,
)
from distcheck.judge.oracles.low_rank import Projection
from distcheck.judge.oracles.references import AtStep, References
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import NotBoundedError, every, real_parts, unit_roundoff
from distcheck.recordings.recording import Kind
from distcheck.records import LossName

Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RoundingBound(GradientForms):
    """One step's mean of the ranks' own gradients: `gradients` [rank][parameter].

    `magnitudes` are what the absolute values of each rank's `passes` backward passes add up to,
    and empty where there is one pass. `half_quanta` is empty where quantizing is not accepted.
    """

    gradients: tuple[Gradients, ...]
    magnitudes: tuple[Gradients, ...]
    passes: int
    half_quanta: tuple[float, ...]
    nan_is_expected: bool
    near: tuple[float, ...] = ()  # how far it may be besides, where micro-batches are not promised
    why_near: str = ""

    def of(self, index: int) -> Within | Either | None:
        found = self.interval(index)
        if found is None:
            return None
        within = Within(found.mean, found.bound, self.nan_is_expected)
        if not self.near:
            return within
        own = [gradients[index] for gradients in self.gradients]
        is_complex = any(gradient is not None and gradient.is_complex() for gradient in own)
        mean = torch.view_as_complex(found.mean) if is_complex else found.mean
        return Either(within, Near(mean, self.near[index]), excuse=self.why_near)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:

        def elementwise(stride: int) -> torch.Tensor:
            found = self.interval(index, parts=own, take=lambda tensor: every(stride, tensor))
            assert found is not None, "each rank has a gradient"
            return found.bound

        return elementwise

    def interval(
        self,
        index: int,
        *,
        wire: str | None = None,
        loss: LossName | None = None,
        take: Take | None = None,
        parts: Sequence[torch.Tensor | None] | None = None,
    ) -> Interval | None:
        """Mean and bound of one parameter's gradient; None where no rank has a gradient.

        `wire` asks for the bound under another promise than the contract's. `loss` asks for what
        the same exchange would have to give here to be right under another loss contract: there
        rank r's gradient would be f'_r / f_r times as large, with f and f' what either multiplies
        its loss by, so here the ranks count f_r / f'_r times their share.
        `take` picks elements; `parts` are the ranks' own gradients, if they are known already.
        """
        parts = parts or [gradients[index] for gradients in self.gradients]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        filled = [torch.zeros_like(present[0]) if part is None else part for part in parts]
        magnitudes = self._magnitudes(index, like=filled[0])
        if take is not None:
            filled = [take(part) for part in filled]
            magnitudes = None if magnitudes is None else [take(part) for part in magnitudes]
        scaled = loss is not None or any(factor != 1.0 for factor in self.shares.loss_factors)
        wire = wire or self.shares.contract.wire
        shares = self.shares.in_mean
        if loss is not None:
            here, there = self.shares.declared(self.shares.loss), self.shares.declared(loss)
            shares = [s * f / other for s, f, other in zip(shares, here, there, strict=True)]
        found = rounding.interval(
            filled,
            shares,
            rescaled=scaled,
            wire=None if wire is None else getattr(torch, wire),
            passes=self.passes,
            magnitudes=magnitudes,
        )
        if not self.half_quanta:
            return found
        return quantum.widened(found, self.half_quanta, shares, present[0].dtype)

    def _magnitudes(self, index: int, *, like: torch.Tensor) -> list[torch.Tensor] | None:
        """Of each rank, zeros where it has no gradient; None where there is one pass."""
        if not self.magnitudes:
            return None
        found = [of_rank[index] for of_rank in self.magnitudes]
        nothing = torch.zeros_like(real_parts(like), dtype=torch.float64)
        return [nothing if size is None else size for size in found]


@dataclass(frozen=True)
class LowRank(GradientForms):
    """The same where a low-rank exchange is accepted."""

    projects = True
    mean: RoundingBound
    projections: tuple[Projection | None, ...]

    def of(self, index: int) -> Projection | None:
        return self.projections[index]

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        return self.mean.limit(index, own)


def gradients(at: AtStep) -> GradientForms:
    """The synchronized gradients of a step. Raises NotBoundedError, NotRecordedError."""
    mean, accepted = mean_at(at), at.accepted
    if accepted is None or accepted.family != "low-rank":
        return mean
    return LowRank(
        at.shares,
        mean.computed,
        mean=mean,
        projections=tuple(
            _projection(at, accepted, index, mean.interval(index)) for index in range(len(at.specs))
        ),
        opening=at.shares.lost,
    )


def mean_at(at: AtStep) -> RoundingBound:
    """The mean of a step, whatever is exchanged in its place. Raises NotBoundedError."""
    return at.kept(_mean)


def _mean(at: AtStep) -> RoundingBound:
    passes = at.training.accumulate
    return RoundingBound(
        at.shares,
        at.computed_where_unseen,
        gradients=at.shard_gradients,
        magnitudes=tuple(tuple(s.magnitudes) for s in at.shards) if passes > 1 else (),
        passes=passes,
        half_quanta=_half_quanta(at),
        nan_is_expected=at.nan_is_expected,
        near=unpromised.of_mean(at),
        why_near=unpromised.excuse(at),
        opening=at.shares.lost or unpromised.said(at),
    )


def _half_quanta(at: AtStep) -> tuple[float, ...]:
    if at.accepted is None or at.accepted.family != "quantized":
        return ()
    halves = []
    for rank, own in zip(at.trace.ranks, at.shard_gradients, strict=True):
        try:
            halves.append(quantum.half_quantum(own, at.accepted.amount))
        except NotBoundedError as error:
            raise NotBoundedError(f"rank {rank} at step {at.step}: {error}") from error
    return tuple(halves)


def _projection(
    at: AtStep, accepted: Accepted, index: int, now: Interval | None
) -> Projection | None:
    """What went into the exchange of one parameter. Raises NotRecordedError."""
    if now is None:
        return None
    earlier = []
    for step in range(at.step) if accepted.feedback else ():
        before = at.references.kept(_EarlierMeans).of_step(step)[index]
        result = at.trace.tensor(0, Kind.GRADIENT, step, index)
        if before is None or result is None:
            raise NotRecordedError(f"rank 0 has no gradient number {index} at step {step}")
        earlier.append((before, result))
    unit, world = unit_roundoff(at.ingredients.dtype), at.trace.layout.world
    return low_rank.carried(now, earlier, rank=accepted.amount, unit=unit, world=world)


class _EarlierMeans:
    """R of every parameter at earlier steps, which every later step needs."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, list[Interval | None]] = {}

    def of_step(self, step: int) -> list[Interval | None]:
        if step not in self._known:
            mean = mean_at(at := self._references.at(step))
            self._known[step] = [mean.interval(index) for index in range(len(at.specs))]
        return self._known[step]


def parameters(at: AtStep) -> Averaged | None:
    """Local SGD: what every rank's own update leaves, where parameters are averaged after the step.
    Raises NotRecordedError.
    """
    averages = at.references.averages
    if averages is None or not averages.at(at.step):
        return None
    ranks = range(at.trace.layout.world)
    after = [at.references.update.run(rank, at.step)[Kind.PARAMETER] for rank in ranks]
    return Averaged(tuple(tuple(of_rank) for of_rank in after))
