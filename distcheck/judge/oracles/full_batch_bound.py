"""full batch float32 and float64: the full batch of a step in a single process.

The reference and its tolerances are in `full_batch.py`. This module provides their inputs at a
step: widening for a lower-precision wire or a quantization grid, and gradients that are computed
shard by shard, at a kink.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from distcheck.judge.oracles import between_devices, kinks, model_outputs, rounding_bound
from distcheck.judge.oracles.forms import (
    EitherForm,
    ExpectedOutputs,
    FullBatchBuffers,
    GradientForms,
    Gradients,
    Limit,
    MeanLoss,
    WithinNorm,
    with_positive_zero,
)
from distcheck.judge.oracles.full_batch import (
    finite_norm,
    loss_tolerance,
    relative_tolerance,
    tolerance_of,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import as_float64, distance, real_parts
from distcheck.recordings.traces.layout import has_loss
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64

_AT_A_KINK = (
    "at some steps rounding decides on which side of a kink (of a ReLU or a maximum) a sample "
    "lies, or a long sum rounds by more than the tolerance: at these steps the reference "
    "processes the global batch shard by shard, which is equivalent in float64"
)

_ROUNDED = (
    "{} rounded by more than the bound, in a single process as well, because nearly equal "
    "numbers cancel: float32 cannot show whether {} right; pass --dtype float64"
)

_ROUNDED_GRADIENTS = _ROUNDED.format("gradients are", "they are")

_TIMES_WORLD = (
    "the loss is {}x the single-process loss: multiplied by the world size, which averaging "
    "gradients compensates. Divide the loss by it before printing"
)

_LONG_LOSS = (
    "at some steps the loss sums so many terms that its rounding exceeds the tolerance: at these "
    "steps the reference is the mean of the ranks' losses, which is equivalent in float64"
)


@dataclass(frozen=True)
class _Sides:
    """Alternatives for gradients too far from the full batch's, by index.

    by_shards  gradients with samples on another side of a kink, computed like the ranks do
    further    additional tolerance if another device computed them
    rounding   errors up to which float32 is inconclusive, for the reason `why`
    """

    by_shards: Mapping[int, torch.Tensor] = field(default_factory=dict)
    further: Mapping[int, float] = field(default_factory=dict)
    rounding: Mapping[int, float] = field(default_factory=dict)
    why: str = _ROUNDED_GRADIENTS


@dataclass(frozen=True)
class FullBatchBound(GradientForms):
    """The gradients of one step's full batch."""

    gradients: Gradients
    tolerances: tuple[float, ...]
    sides: _Sides
    nan_is_expected: bool

    def of(self, index: int) -> WithinNorm | EitherForm | None:
        expected, tolerance, sides = self.gradients[index], self.tolerances[index], self.sides
        if expected is None:
            return None
        rounding = sides.rounding.get(index, 0.0)
        near = WithinNorm(expected, tolerance, self.nan_is_expected, rounding, sides.why)
        if index in sides.further:
            wider = WithinNorm(expected, tolerance + sides.further[index])
            return EitherForm(near, wider, excuse=between_devices.EXCUSE)
        if index not in sides.by_shards:
            return near
        return EitherForm(near, WithinNorm(sides.by_shards[index], tolerance), excuse=_AT_A_KINK)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        return lambda stride: self.tolerances[index] + self.sides.further.get(index, 0.0)


def gradients(at: AtStep) -> FullBatchBound:
    indices = range(len(at.specs))
    expected = tuple(_expected_gradient(at, index) for index in indices)
    tolerances = tuple(tolerance(at, index) for index in indices)
    in_float32 = at.full_batch_layer == IN_FLOAT32
    refused = _refused_gradients(at, expected, tolerances) if in_float32 else {}
    sides = _Sides()
    if refused and at.case.reference_device is not None:
        further, rounding, why = between_devices.tolerances_between_devices(
            at, expected, tolerances, refused
        )
        sides = _Sides(further=further, rounding=rounding, why=why or _ROUNDED_GRADIENTS)
    elif refused:
        by_shards = _alternatives_at_kinks(at, expected, tolerances, refused)
        rounding = _rounding(at, expected, tolerances, by_shards, refused)
        sides = _Sides(by_shards=by_shards, rounding=rounding)
    return FullBatchBound(
        at.shares,
        _local_gradients(at),
        gradients=expected,
        tolerances=tolerances,
        sides=sides,
        nan_is_expected=at.nan_is_expected,
        closing=_note_on_ghost_batch(at) if at.step == 0 and at.full_batch.ghost else "",
    )


def _local_gradients(at: AtStep) -> tuple[Gradients, ...]:
    if at.communicating_form:
        return at.unexchanged
    return at.recomputed_if_unrecorded if at.references.mesh is None else ()


def _note_on_ghost_batch(at: AtStep) -> str:
    reference = at.references.full_batch
    sizes = reference.separately_normalized_sizes(at.shares.sizes)
    stretches = "shard" if len(sizes) == len(at.shares.sizes) else "micro-batches"
    distance = reference.distance_from_single_batch(at.step, at.full_batch)
    return (
        "BatchNorm: the reference uses ghost batches, in which each rank normalizes its own "
        f"{stretches} ({', '.join(map(str, sizes))}). It is {distance:.2f} (relative L2) from "
        "full-batch training, which no gradient sync can correct"
    )


def _expected_gradient(at: AtStep, index: int) -> torch.Tensor | None:
    """Return one parameter's gradient, None if a single process has none.

    If a GradScaler's scale makes a shard's gradient overflow, the step must be skipped, and those
    elements are expected to be the shards' mean: no full batch overflows in the same way.
    """
    full = at.full_batch.gradients[index]
    if full is None or at.training.loss_scale is None:
        return full
    interval = rounding_bound.mean_of_step(at).interval(index)
    if interval is None or bool(interval.mean.isfinite().all()):
        return full
    parts = real_parts(full)
    required = torch.where(interval.mean.isfinite(), parts, interval.mean.to(parts.dtype))
    return torch.view_as_complex(required) if full.is_complex() else required


def tolerance(at: AtStep, index: int) -> float:
    """Return the largest L2 error of a parameter's gradient.

    A rounded (or quantized) reduction differs from the mean of the shards by at most the rounding
    bound, and this mean differs from the full batch by the tolerance of an exact sum: both add.
    """
    exact = _relative_to_batch(at, index)
    if at.contract.wire is None and (at.accepted is None or at.accepted.family != "quantized"):
        return exact
    interval = rounding_bound.mean_of_step(at).interval(index)
    return exact if interval is None else exact + float(interval.bound.norm())


def _relative_to_batch(at: AtStep, index: int) -> float:
    """Return the same for gradients that are neither rounded nor quantized in communication."""
    samples, layer = at.shares.samples, at.full_batch_layer
    relative = relative_tolerance(layer, samples, at.full_batch.positions, _splits(at))
    return tolerance_of(at.specs[index], layer, relative, at.module_scales, samples)


def _splits(at: AtStep) -> int:
    """Return the maximum number of additions between ranks for a term of a split sum."""
    mesh = at.references.mesh
    if mesh is None:
        return 0
    layers = {spec.name.rpartition(".")[0] for spec in at.specs}
    return 2 * len(layers) * (mesh.world // mesh.data - 1)


def _refused_gradients(
    at: AtStep, expected: Gradients, tolerances: Sequence[float]
) -> dict[int, list[torch.Tensor]]:
    """Return recorded gradients too far from the full batch's; the comparison, which decides, may
    refuse fewer.
    """
    recorded = {
        index: [g for g in at.recorded_gradients(index) if not distance(g, full) <= allowed]
        for index, (full, allowed) in enumerate(zip(expected, tolerances, strict=True))
        if full is not None
    }
    return {index: too_far for index, too_far in recorded.items() if too_far}


def _alternatives_at_kinks(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> dict[int, torch.Tensor]:
    """Return alternatives for gradients if rounding moves a sample across a kink: the shards' mean,
    if it equals the full batch up to rounding; in a mesh, where no rank has a shard, the full batch
    with these samples moved.
    """
    found = {}
    for index, too_far in refused.items():
        full, interval = expected[index], rounding_bound.mean_of_step(at).interval(index)
        if full is None or interval is None:
            continue
        shards = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        # If the distance is NaN, as of two infinities, the comparison decides.
        near = any(not distance(g, shards) > tolerances[index] for g in too_far)
        if near and _shards_are_the_batch(at, index):
            found[index] = shards
    left = [index for index in refused if index not in found]
    if at.references.mesh is None or not left:
        return found
    return found | kinks.gradients_on_sides_of_kinks(at, left)


def _rounding(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    other_sides: Mapping[int, torch.Tensor],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> dict[int, float]:
    """Return, in a mesh, the tolerated errors of gradients far from all expectations, if the
    reference's own rounding is as large.
    """
    found = {}
    for index, too_far in refused.items() if at.references.mesh is not None else ():
        right = [one for one in (expected[index], other_sides.get(index)) if one is not None]
        error = max(min(distance(g, one) for one in right) for g in too_far)
        if not error <= tolerances[index]:
            found[index] = gradient_rounding(at, index, error, tolerances[index])
    return found


def gradient_rounding(at: AtStep, index: int, error: float, bound: float) -> float:
    """Return the largest error of a parameter's gradient that may be rounding. Return 0 if the
    tolerance `bound` holds for this model.
    """
    return at.own_rounding.allows(lambda batch: batch.gradients[index], error=error, bound=bound)


def _shards_are_the_batch(at: AtStep, index: int) -> bool:
    """Return True if the shards' mean is the full batch's gradient up to float32 rounding: in
    float64 they agree within the tolerance of full batch float64, from the same parameters.
    """
    try:
        in_double = at.in_double
        interval = rounding_bound.mean_of_step(in_double).interval(index)
        full = in_double.full_batch.gradients[index]
        if interval is None or full is None:
            return False
        mean = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        apart = float((mean - full).norm())
        return apart <= _relative_to_batch(in_double, index)
    except Exception:  # a workload may not compute in float64
        return False


def outputs(at: AtStep) -> ExpectedOutputs | None:
    """Return the model's outputs for the samples of each data coordinate."""
    return model_outputs.expected_outputs(
        at, at.full_batch_layer, _splits(at), _ROUNDED.format("outputs are", "they are")
    )


def buffers(at: AtStep) -> FullBatchBuffers | None:
    """Return the buffers after forward, for code that communicates by itself."""
    if not at.communicating_form:
        return None
    relative = relative_tolerance(at.full_batch_layer, at.shares.samples, at.full_batch.positions)
    return FullBatchBuffers(
        tuple(
            WithinNorm(as_float64(one), relative * finite_norm(one))
            for one in at.full_batch.buffers
        ),
        tuple(tuple(shard.buffers) for shard in at.shards),
        tuple(at.trace.ranks),
    )


def loss(at: AtStep) -> MeanLoss:
    """Return the mean loss. If the ranks' loss is outside the narrower bound, terms of both signs
    may cancel: then the samples' losses are computed, with one forward pass each.
    """
    expected = at.full_batch.loss
    if at.communicating_form and (times := _times_the_loss(at)) != 1:
        return replace(_near_loss(at, expected * times), remark=_TIMES_WORLD.format(times))
    return _near_loss(at, expected)


def _times_the_loss(at: AtStep) -> int:
    """Return the factor of a loss that communicates by itself: the world size, if averaging
    gradients restores each rank's. Its weights must be right nevertheless.
    """
    world, expected = at.references.whole.layout.world, at.full_batch.loss
    allowed = loss_tolerance(at.full_batch_layer, expected) * world
    times = expected * world
    return world if all(abs(one - times) <= allowed for one in recorded_losses(at)) else 1


def _near_loss(at: AtStep, expected: float) -> MeanLoss:
    layer = at.full_batch_layer
    apart = max((abs(loss - expected) for loss in recorded_losses(at)), default=0.0)
    bound = loss_tolerance(layer, expected)
    # Losses of single samples are no terms of a loss that compares samples.
    if bound < apart < math.inf and not at.communicating_form:
        magnitude = at.references.full_batch.loss_magnitude(at.step, expected)
        bound = loss_tolerance(layer, magnitude)
    refused = bound < apart < math.inf and (layer == IN_FLOAT32 or bool(at.communicating_form))
    if refused and at.references.mesh is not None:
        rounding = at.own_rounding.allows(
            lambda b: with_positive_zero(b.loss), error=apart, bound=bound
        )
        why = _ROUNDED.format("the loss is", "it is")
        form = WithinNorm(with_positive_zero(expected), bound, rounding=rounding, why=why)
        return MeanLoss(form, expected, bound, rounding)
    near = WithinNorm(with_positive_zero(expected), bound)
    if not refused or not _losses_are_the_batchs(at):
        return MeanLoss(near, expected, bound)
    by_shards = WithinNorm(
        with_positive_zero(_mean_loss(at, [shard.loss for shard in at.shards])), bound
    )
    return MeanLoss(EitherForm(near, by_shards, excuse=_LONG_LOSS), expected, bound)


def recorded_losses(at: AtStep) -> list[float]:
    """Return the recorded loss of the batch: one number. In a mesh, return one number per place
    within a data coordinate, whose ranks have the loss together.
    """
    mesh, whole = at.references.mesh, at.references.whole
    if mesh is None:
        return [_mean_loss(at, [header.loss for header in at.shares.headers])]
    found = []
    for ranks in mesh.along("data"):
        headers = [whole.header(rank, at.step) for rank in ranks]
        if all(has_loss(header.loss) for header in headers):
            over = max(1, sum(header.loss_count for header in headers))
            found.append(sum(h.loss * h.loss_count for h in headers) / over)
    return found


def _mean_loss(at: AtStep, losses: Sequence[float]) -> float:
    pairs = zip(losses, at.shares.weights, strict=True)
    return sum(loss * weight / len(losses) for loss, weight in pairs)


def _losses_are_the_batchs(at: AtStep) -> bool:
    """Return True if the shards' mean loss equals the full batch's up to float32 rounding."""
    try:
        in_double = at.in_double
        whole = in_double.full_batch.loss
        apart = abs(_mean_loss(in_double, [shard.loss for shard in in_double.shards]) - whole)
        return apart <= loss_tolerance(IN_FLOAT64, whole)
    except Exception:  # a workload may not compute in float64
        return False
