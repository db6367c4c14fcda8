"""All expectations of one step, each computed when a check first asks for it."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from distcheck.contract import Contract, DDPBuckets
from distcheck.judge.acceptance import Accepted, read
from distcheck.judge.oracles import low_rank, order_exact, quantum, rounding
from distcheck.judge.oracles.averaging import Averages
from distcheck.judge.oracles.full_batch import (
    FullBatch,
    module_scales,
    relative_tolerance,
    underflow,
)
from distcheck.judge.oracles.inexact_sums import Standing
from distcheck.judge.oracles.lattice import LatticeStep
from distcheck.judge.oracles.references import References
from distcheck.judge.oracles.rounding import Interval
from distcheck.judge.oracles.shards import (
    NotRecordedError,
    ShardResult,
    declared_factor,
    loss_scale,
)
from distcheck.judge.oracles.update import UpdateReference
from distcheck.machine.numerics import real_parts, unit_roundoff
from distcheck.records import LossName
from distcheck.records.layers import IN_FLOAT64
from distcheck.records.mistakes import Shown
from distcheck.training.building import Ingredients
from distcheck.training.traces.layout import Kind
from distcheck.training.traces.reader import StepHeader, TraceReader

Take = Callable[[torch.Tensor], torch.Tensor]


class StepExpectation:
    """What should have been at `step`, given what the ranks recorded before it."""

    def __init__(
        self,
        ingredients: Ingredients,
        contract: Contract,
        trace: TraceReader,
        references: References,
        step: int,
    ) -> None:
        self.ingredients, self.contract, self.trace = ingredients, contract, trace
        self.step = step
        # What comparisons with the shards' mean would show, by parameter: asked for by two layers.
        self.shown: dict[int, Shown | None] = {}
        self._references = references
        self._in_double: StepExpectation | None = None

    @cached_property
    def headers(self) -> list[StepHeader]:
        """The ranks' headers."""
        return [self.trace.header(r, self.step) for r in range(self.trace.layout.world)]

    @cached_property
    def weights(self) -> list[float]:
        """The ranks' sample weights n_r * W / N: 1.0 for equal shards."""
        return [size * len(self._sizes) / sum(self._sizes) for size in self._sizes]

    @cached_property
    def shards(self) -> list[ShardResult]:
        """Every rank's own part, computed again."""
        return [self._references.shards.run(r, self.step) for r in range(self.trace.layout.world)]

    def shard_from(self, rank: int, buffers_of: Sequence[int]) -> ShardResult:
        """A rank's part if each buffer had been that of another rank before the step."""
        return self._references.shards.run(rank, self.step, buffers_of=buffers_of)

    def passes(self, rank: int) -> list[list[torch.Tensor | None]]:
        """What each of a rank's backward passes adds to its gradients."""
        return self._references.shards.passes(rank, self.step)

    @cached_property
    def order_exact(self) -> list[torch.Tensor | None]:
        """X: the synchronised gradients to the bit."""
        reduced = order_exact.expected_gradients(
            self.contract,
            self.ingredients.case.backend,
            [shard.gradients for shard in self.shards],
            weights=self.weights,
            step=self.step - self._built_at,
            ready_order=self.trace.header(0, self._ordering_step).ready_order,
            like=self.parameters,
        )
        scale = self.loss_scales[0]  # taken back after the exchange, which a power of two may be
        return reduced if scale == 1.0 else [g if g is None else g / scale for g in reduced]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters as they were built: how they lie in memory, and which of them train."""
        return self._references.parameters

    @property
    def _ordering_step(self) -> int:
        """The step whose backward DDP's buckets are rebuilt after."""
        order = self.contract.order
        rebuilt_at = order.rebuilt_at if isinstance(order, DDPBuckets) else None
        return min(self.step, self._built_at + max(0, (rebuilt_at or 1) - 1))

    @property
    def _built_at(self) -> int:
        """The step before which the strategy was given the model: the first, or a resumption."""
        resumed = self.ingredients.training.resume_before
        return resumed if resumed is not None and self.step >= resumed else 0

    def interval(
        self,
        index: int,
        *,
        wire: str | None = None,
        loss: LossName | None = None,
        take: Take | None = None,
        parts: Sequence[torch.Tensor | None] | None = None,
    ) -> Interval | None:
        """R: mean and bound of one parameter's gradient; None where no rank has a gradient.

        `wire` asks for the bound under another promise than the contract's. `loss` asks for what
        the same exchange would have to give here to be right under another loss contract: there
        rank r's gradient would be f'_r / f_r times as large, with f and f' what either multiplies
        its loss by, so here the ranks count f_r / f'_r times their share.
        `take` picks elements; `parts` are the ranks' own gradients, if they are known already.
        """
        parts = parts or [shard.gradients[index] for shard in self.shards]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        filled = [torch.zeros_like(present[0]) if part is None else part for part in parts]
        magnitudes = self._magnitudes(index, like=filled[0])
        if take is not None:
            filled = [take(part) for part in filled]
            magnitudes = None if magnitudes is None else [take(part) for part in magnitudes]
        scaled = loss is not None or any(factor != 1.0 for factor in self._loss_factors)
        wire = wire or self.contract.wire
        shares = self.shares
        if loss is not None:
            here, there = self._declared(self.ingredients.case.loss), self._declared(loss)
            shares = [s * f / other for s, f, other in zip(shares, here, there, strict=True)]
        found = rounding.interval(
            filled,
            shares,
            rescaled=scaled,
            wire=None if wire is None else getattr(torch, wire),
            passes=self.ingredients.training.accumulate,
            magnitudes=magnitudes,
        )
        if not self.half_quanta:
            return found
        return quantum.widened(found, self.half_quanta, shares, present[0].dtype)

    def _magnitudes(self, index: int, *, like: torch.Tensor) -> list[torch.Tensor] | None:
        """What the absolute values of each rank's backward passes add up to, where the loop runs
        several; None where the gradients' own will do.
        """
        if self.ingredients.training.accumulate == 1:
            return None
        found = [shard.magnitudes[index] for shard in self.shards]
        nothing = torch.zeros_like(real_parts(like), dtype=torch.float64)
        return [nothing if size is None else size for size in found]

    @cached_property
    def accepted(self) -> Accepted | None:
        """What the case accepts."""
        return read(self.ingredients.case.accept)

    def carried(self, index: int) -> low_rank.Carried | None:
        """What went into the exchange of one parameter where a low-rank one is accepted. Raises
        NotRecordedError.
        """
        accepted, now = self.accepted, self.interval(index)
        if accepted is None or now is None:
            return None
        earlier = []
        for step in range(self.step) if accepted.feedback else ():
            before = self._earlier(step)[index]
            result = self.trace.tensor(0, Kind.GRADIENT, step, index)
            if before is None or result is None:
                raise NotRecordedError(f"rank 0 has no gradient number {index} at step {step}")
            earlier.append((before, result))
        world = self.trace.layout.world
        return low_rank.carried(now, earlier, unit=self._unit, world=world)

    def _earlier(self, step: int) -> list[Interval | None]:
        """R of every parameter at an earlier step."""
        kept = self._references.intervals
        if step not in kept:
            then = self.at(step)
            kept[step] = [then.interval(i) for i in range(len(self.trace.layout.model.parameters))]
        return kept[step]

    def projected(self, result: torch.Tensor, given: low_rank.Carried) -> low_rank.Projected:
        """How one rank's result fits what went into its exchange."""
        assert self.accepted is not None
        return low_rank.project(
            result, given, rank=self.accepted.amount, world=len(self.weights), unit=self._unit
        )

    @property
    def averages(self) -> Averages | None:
        """When parameters are averaged, where ranks may train by themselves between that."""
        return self._references.averages

    @property
    def _unit(self) -> float:
        return unit_roundoff(self.ingredients.dtype)

    @cached_property
    def half_quanta(self) -> list[float]:
        """As `quantum.half_quanta`; empty where quantising is not accepted."""
        if self.accepted is None or self.accepted.family != "quantised":
            return []
        gradients = {r: s.gradients for r, s in zip(self.trace.ranks, self.shards, strict=True)}
        return quantum.half_quanta(gradients, self.accepted.amount, self.step)

    @property
    def unscaled(self) -> list[float]:
        """What each rank's shard gradients must be divided by to be its mean loss's gradients."""
        found = zip(self.weights, self._loss_factors, self.loss_scales, strict=True)
        by_loss = self.contract.weighting == "loss"
        return [weight * scale if by_loss else factor for weight, factor, scale in found]

    @cached_property
    def loss_scales(self) -> list[float]:
        """What a GradScaler has multiplied each rank's loss by."""
        ranks = range(self.trace.layout.world)
        return [loss_scale(self.ingredients, self.trace, rank, self.step) for rank in ranks]

    @property
    def _loss_factors(self) -> list[float]:
        """What the ranks' shard gradients are multiplied by: as the case declares, and as was
        seen of a strategy that promises nothing.
        """
        observed = self.contract.observes_loss
        return [
            factor * scale * (header.loss_factor if observed else 1.0)
            for factor, scale, header in zip(
                self._declared(self.ingredients.case.loss),
                self.loss_scales,
                self.headers,
                strict=True,
            )
        ]

    def _declared(self, loss: LossName) -> list[float]:
        """What a loss contract multiplies each rank's mean loss by."""
        return [declared_factor(loss, n, sum(self._sizes), self._sizes) for n in self._sizes]

    @property
    def lost(self) -> str:
        """Says which ranks multiplied their loss by what no gradient comes back from; empty where
        none did.
        """
        factors = {
            rank: f"{factor:g}"
            for rank, factor in zip(self.trace.ranks, self.unscaled, strict=True)
            if not factor or not math.isfinite(factor)
        }
        if not factors:
            return ""
        ranks = f"rank{'s' * (len(factors) > 1)} {', '.join(map(str, factors))}"
        by = " or ".join(dict.fromkeys(factors.values()))
        return f"the loss of {ranks} is multiplied by {by}, from which no gradient comes back"

    @property
    def shares(self) -> list[float]:
        """What each rank's shard gradient counts for in the mean over all samples."""
        world = len(self.weights)
        if self.contract.weighting == "loss":
            return [1.0 / scale / world for scale in self.loss_scales]
        pairs = zip(self.weights, self._loss_factors, strict=True)
        return [weight / factor / world if factor else math.nan for weight, factor in pairs]

    def buffers(self, rank: int) -> list[list[torch.Tensor]]:
        """What a rank's buffers may be after the step: one way, or two where none is promised."""
        ways = [self.shards[rank].buffers]
        if self.contract.takes_any_buffers and rank != 0:
            ways.append(self._references.shards.run(rank, self.step, buffers_of=0).buffers)
        return ways

    @cached_property
    def full_batch(self) -> FullBatch:
        """S32, S64: the whole batch in one process."""
        return self._references.full_batch.run(self.step)

    @cached_property
    def loss_magnitude(self) -> float:
        """The mean absolute value of the losses of the whole batch's samples; it takes a forward
        pass for each.
        """
        return self._references.full_batch.loss_magnitude(self.step, self.full_batch.loss)

    def owed_by_full_batch(self, index: int) -> torch.Tensor | None:
        """S32, S64: one parameter's gradient, None where one machine has none.

        Where a GradScaler's scale takes a shard's gradient beyond all numbers, the step is to be
        skipped for it, and what is expected of those elements is the shards' mean: no whole batch
        has their overflow.
        """
        full = self.full_batch.gradients[index]
        if full is None or self.ingredients.training.loss_scale is None:
            return full
        interval = self.interval(index)
        if interval is None or bool(interval.mean.isfinite().all()):
            return full
        parts = real_parts(full)
        required = torch.where(interval.mean.isfinite(), parts, interval.mean.to(parts.dtype))
        return torch.view_as_complex(required) if full.is_complex() else required

    def shard_by_shard(self, index: int) -> torch.Tensor | None:
        """S32, at a kink: `owed_by_full_batch` with the samples taken as the ranks take them, where
        `shards_are_the_batch`; None where no shard has a gradient.
        """
        interval, full = self.interval(index), self.full_batch.gradients[index]
        if interval is None or full is None:
            return None
        return torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean

    def shards_are_the_batch(self, index: int) -> bool:
        """Whether the shards' mean is the whole batch's gradient, but for float32's rounding: in
        float64 they are the same, within S64's tolerance, from the same parameters.
        """
        references = self._references.in_double
        given = (references.ingredients, self.contract, self.trace, references)
        try:
            self._in_double = self._in_double or StepExpectation(*given, self.step)
            mean = self._in_double.shard_by_shard(index)
            full = self._in_double.full_batch.gradients[index]
            apart = math.inf if mean is None or full is None else float((mean - full).norm())
            return apart <= self._in_double.relative_to_batch(IN_FLOAT64, index)
        except Exception:  # theirs: not every workload computes in float64
            return False

    @cached_property
    def _sizes(self) -> list[int]:
        return [len(header.ids) for header in self.headers]

    @cached_property
    def _module_scales(self) -> dict[str, float]:
        names = [spec.name for spec in self.trace.layout.model.parameters]
        return module_scales(names, self.full_batch.gradients)

    def full_batch_tolerance(self, layer: str, index: int) -> float:
        """S32, S64: the most by which a parameter's gradient may differ, as an L2 norm.

        What is rounded (or quantised) on its way differs from the mean of the shards by as much as
        R allows, and that mean from the whole batch by what an exact sum would: both add up.
        """
        tolerance = self.relative_to_batch(layer, index)
        if self.contract.wire is None and not self.half_quanta:
            return tolerance
        interval = self.interval(index)
        return tolerance if interval is None else tolerance + float(interval.bound.norm())

    def relative_to_batch(self, layer: str, index: int) -> float:
        """The same of gradients that are neither rounded nor quantised on their way."""
        spec = self.trace.layout.model.parameters[index]
        samples = sum(self._sizes)
        scale = self._module_scales.get(spec.name.rpartition(".")[0], 0.0)
        return relative_tolerance(layer, samples) * scale + underflow(layer, samples, spec.elements)

    @property
    def normalised_sizes(self) -> list[int]:
        """The stretches of the batch that BatchNorm normalises by themselves."""
        return self._references.full_batch.normalised_sizes(self._sizes)

    @property
    def update(self) -> UpdateReference:
        """The optimizer's step, again, for any rank."""
        return self._references.update

    def ghost_distance(self) -> float:
        """How far the ghost batch's gradient is from that of true full-batch training."""
        return self._references.full_batch.distance_from_true(self.step, self.full_batch)

    @cached_property
    def lattice(self) -> LatticeStep:
        """The lattice's closed form. Raises HeadroomError."""
        return self._references.lattice_step(self.step)

    @property
    def standings(self) -> dict[int, Standing]:
        """What the lattice's gradients are, by step, as far as it is known."""
        return self._references.standings

    def at(self, step: int) -> "StepExpectation":
        """What is expected at another step."""
        if step == self.step:
            return self
        return StepExpectation(self.ingredients, self.contract, self.trace, self._references, step)
