"""The rounding bound: the mean of the ranks' local gradients, in any summation order.

`rounding.py` has the formula. This module provides its inputs at a step: rank weights, the number
of roundings, and bounds widened by `--accept` (`quantum.py`). An accepted design may replace the
mean, or expect a combination of parameters (`design.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distcheck.judge.acceptance import AcceptedDeviation
from distcheck.judge.oracles import quantum, rounding, unpromised
from distcheck.judge.oracles.forms import (
    CombinedTensors,
    EitherForm,
    GradientForms,
    Gradients,
    Limit,
    WithinBound,
    WithinNorm,
    WithoutBias,
)
from distcheck.judge.oracles.references import AtStep, References
from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, every_nth_number, real_parts
from distcheck.records import LossName

Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RoundingBound(GradientForms):
    """The mean of the ranks' local gradients at one step, `gradients` [rank][parameter].

    `magnitudes` are the summed absolute values over each rank's `passes` backward passes; empty for
    one pass. `half_quanta` is empty if quantization is not accepted.
    """

    gradients: tuple[Gradients, ...]
    magnitudes: tuple[Gradients, ...]
    passes: int
    half_quanta: tuple[tuple[torch.Tensor, ...], ...]
    nan_is_expected: bool
    bits: int = 0  # of stochastic rounding, if accepted, and the size of a block
    block: int = 0
    sums: int = 1  # number of sums of errors in the run
    near: tuple[float, ...] = ()  # additional tolerance if micro-batches are not promised
    why_near: str = ""

    def of(self, index: int) -> WithinBound | EitherForm | WithoutBias | None:
        found = self.interval(index)
        if found is None:
            return None
        within = WithinBound(found.mean, found.bound, self.nan_is_expected)
        if self.bits:
            return WithoutBias(within, self._errors(index, within))
        if not self.near:
            return within
        own = [gradients[index] for gradients in self.gradients]
        is_complex = any(gradient is not None and gradient.is_complex() for gradient in own)
        mean = torch.view_as_complex(found.mean) if is_complex else found.mean
        return EitherForm(within, WithinNorm(mean, self.near[index]), excuse=self.why_near)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:

        def elementwise(stride: int) -> torch.Tensor:
            found = self.interval(
                index, parts=own, take=lambda tensor: every_nth_number(stride, tensor)
            )
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
        """Return mean and bound of one parameter's gradient, or None if no rank has a gradient.

        `wire` replaces the contract's promise. `loss` computes the right result under a different
        loss contract. Rank r's gradient would then be f'_r / f_r times as large, with f and f' the
        loss factors of both contracts, so the rank weights here are multiplied by f_r / f'_r.
        `take` selects elements; `parts` are the ranks' local gradients, if known.
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
        shares = self.shares.mean_weights
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
        halves = [of_rank[index] for of_rank in self.half_quanta]
        halves = [half if take is None or not half.dim() else take(half) for half in halves]
        return quantum.quantized_interval(found, halves, shares, present[0].dtype)

    def _errors(self, index: int, within: WithinBound) -> quantum.Unbiased:
        """Return the errors of stochastic rounding."""
        known = [of_rank[index] for of_rank in self.gradients]
        present = next(gradient for gradient in known if gradient is not None)
        filled = [torch.zeros_like(present) if g is None else g for g in known]
        weights = self.shares.mean_weights
        suspects = quantum.biased_roundings(filled, weights, self.bits, self.block)
        halves = [of_rank[index].double() for of_rank in self.half_quanta]
        width = torch.zeros_like(within.mean)
        for half, weight in zip(halves, weights, strict=True):
            width = width + abs(weight) * half
        return quantum.Unbiased(
            mean=within.mean,
            suspects=suspects,
            width=width.reshape(-1),
            rounding=rounding.interval(filled, weights).bound.reshape(-1),
            probability=quantum.FALSE_ALARM / (len(suspects) * self.sums),
        )

    def _magnitudes(self, index: int, *, like: torch.Tensor) -> list[torch.Tensor] | None:
        """Return each rank's magnitudes, zeros without a gradient; None if there is one pass."""
        if not self.magnitudes:
            return None
        found = [of_rank[index] for of_rank in self.magnitudes]
        nothing = torch.zeros_like(real_parts(like), dtype=torch.float64)
        return [nothing if size is None else size for size in found]


def gradients(at: AtStep) -> GradientForms | None:
    """Return the reduced gradients of a step; None if ranks keep their local ones. Raises
    NotBoundedError, NotRecordedError.
    """
    local, design = at.references.parameter_design, at.references.design
    if local is not None and not local.warms_up(at.step):
        return None
    return (None if design is None else design.gradients(at)) or mean_of_step(at)


def mean_of_step(at: AtStep) -> RoundingBound:
    """Return the mean of a step, for any kind of communicated tensors. Raises NotBoundedError."""
    return at.kept(_mean)


def _mean(at: AtStep) -> RoundingBound:
    passes, accepted = at.training.accumulate, _quantized(at)
    return RoundingBound(
        at.shares,
        at.recomputed_if_unrecorded,
        gradients=at.shard_gradients,
        magnitudes=tuple(tuple(s.magnitudes) for s in at.shards) if passes > 1 else (),
        passes=passes,
        half_quanta=_half_quanta(at),
        bits=accepted.number("bits") if accepted is not None and accepted["draws"] else 0,
        block=accepted.number("block") if accepted is not None else 0,
        sums=len(at.specs) * at.case.steps,
        nan_is_expected=at.nan_is_expected,
        near=unpromised.mean_tolerances(at),
        why_near=unpromised.micro_batch_excuse(at),
        opening=at.shares.lost or unpromised.unpromised_sentence(at),
    )


class EarlierMeans:
    """Means and bounds of earlier steps, which every later step needs."""

    def __init__(self, references: References) -> None:
        self._references = references
        self._known: dict[int, list[Interval | None]] = {}

    def of_step(self, step: int) -> list[Interval | None]:
        if step not in self._known:
            mean = mean_of_step(at := self._references.at(step))
            self._known[step] = [mean.interval(index) for index in range(len(at.specs))]
        return self._known[step]


def _quantized(at: AtStep) -> AcceptedDeviation | None:
    accepted = at.accepted
    return accepted if accepted is not None and accepted.family == "quantized" else None


def _half_quanta(at: AtStep) -> tuple[tuple[torch.Tensor, ...], ...]:
    accepted = _quantized(at)
    if accepted is None:
        return ()
    halves = []
    for rank, own in zip(at.trace.ranks, at.shard_gradients, strict=True):
        try:
            halves.append(
                quantum.half_quanta(
                    own,
                    accepted.number("bits"),
                    block=accepted.number("block"),
                    norm=bool(accepted["scale"]),
                    stochastic=bool(accepted["draws"]),
                )
            )
        except NotBoundedError as error:
            raise NotBoundedError(f"rank {rank} at step {at.step}: {error}") from error
    return tuple(halves)


def parameters(at: AtStep) -> CombinedTensors | None:
    """Return tensors that ranks combine after this step. Raises NotRecordedError."""
    design, step = at.references.parameter_design, at.step
    tensors = [] if design is None else design.tensors_at(step)
    if design is None or not tensors:
        return None
    updates = [at.references.update.run(rank, step) for rank in range(at.trace.layout.world)]
    return CombinedTensors(tensors, lambda k, i: design.combined(step, k, i, updates))
