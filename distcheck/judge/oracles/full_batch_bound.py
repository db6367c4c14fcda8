"""full batch float32 and float64: the whole batch of a step in one process.

The reference and its tolerances are in `full_batch.py`. Here is what goes into them at a step: what
a shorter wire or a grid widens, and which gradients are taken shard by shard, at a kink.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from distcheck.judge.oracles import between_devices, kinks, model_outputs, rounding_bound
from distcheck.judge.oracles.forms import (
    AfterBatch,
    Either,
    GradientForms,
    Gradients,
    Limit,
    MeanLoss,
    Near,
    Outputs,
    number,
)
from distcheck.judge.oracles.full_batch import (
    loss_tolerance,
    norm,
    relative_tolerance,
    tolerance_of,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import distance, real_parts, wide
from distcheck.recordings.traces.layout import has_loss
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64

_AT_A_KINK = (
    "at some steps rounding decides on which side of a kink (of a ReLU, of a maximum) a sample "
    "is, or a long sum rounds by more than the tolerance: there the whole batch is taken shard by "
    "shard, which in float64 is the same"
)

_ROUNDED = (
    "{} rounded by more than the bound, in one process as well, as nearly equal numbers cancel: "
    "float32 does not show whether {} right; give --dtype float64"
)

_ROUNDED_GRADIENTS = _ROUNDED.format("gradients are", "they are")

_TIMES_WORLD = (
    "the loss is {} times that of one process: the number of ranks, which an average of gradients "
    "takes back. A loss that is printed must be divided by it"
)

_LONG_LOSS = (
    "at some steps the loss adds up so many terms that its rounding is beyond the tolerance: there "
    "it is the mean of the ranks' own losses, which in float64 is the whole batch's"
)


@dataclass(frozen=True)
class _Sides:
    """What else gradients may be that are too far from the whole batch's, by their indices.

    by_shards  those that rounding puts on another side of a kink, taken as ranks take their samples
    further    how much further those may be off that another device has computed
    rounding   how far those may be off of which float32 cannot say more, for the reason `why`
    """

    by_shards: Mapping[int, torch.Tensor] = field(default_factory=dict)
    further: Mapping[int, float] = field(default_factory=dict)
    rounding: Mapping[int, float] = field(default_factory=dict)
    why: str = _ROUNDED_GRADIENTS


@dataclass(frozen=True)
class FullBatchBound(GradientForms):
    """The gradients of one step's whole batch."""

    gradients: Gradients
    tolerances: tuple[float, ...]
    sides: _Sides
    nan_is_expected: bool

    def of(self, index: int) -> Near | Either | None:
        expected, tolerance, sides = self.gradients[index], self.tolerances[index], self.sides
        if expected is None:
            return None
        rounding = sides.rounding.get(index, 0.0)
        near = Near(expected, tolerance, self.nan_is_expected, rounding, sides.why)
        if index in sides.further:
            wider = Near(expected, tolerance + sides.further[index])
            return Either(near, wider, excuse=between_devices.EXCUSE)
        if index not in sides.by_shards:
            return near
        return Either(near, Near(sides.by_shards[index], tolerance), excuse=_AT_A_KINK)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        return lambda stride: self.tolerances[index] + self.sides.further.get(index, 0.0)


def gradients(at: AtStep) -> FullBatchBound:
    indices = range(len(at.specs))
    expected = tuple(_expected(at, index) for index in indices)
    tolerances = tuple(tolerance(at, index) for index in indices)
    in_float32 = at.full_batch_layer == IN_FLOAT32
    refused = _refused(at, expected, tolerances) if in_float32 else {}
    sides = _Sides()
    if refused and at.case.reference_device is not None:
        further, rounding, why = between_devices.allowed(at, expected, tolerances, refused)
        sides = _Sides(further=further, rounding=rounding, why=why or _ROUNDED_GRADIENTS)
    elif refused:
        by_shards = _on_other_sides(at, expected, tolerances, refused)
        rounding = _rounding(at, expected, tolerances, by_shards, refused)
        sides = _Sides(by_shards=by_shards, rounding=rounding)
    return FullBatchBound(
        at.shares,
        _computed(at),
        gradients=expected,
        tolerances=tolerances,
        sides=sides,
        nan_is_expected=at.nan_is_expected,
        closing=_of_ghost(at) if at.step == 0 and at.full_batch.ghost else "",
    )


def _computed(at: AtStep) -> tuple[Gradients, ...]:
    """Each rank's own gradients, where it has any by itself."""
    if at.exchanges_itself:
        return at.unexchanged
    return at.computed_where_unseen if at.references.mesh is None else ()


def _of_ghost(at: AtStep) -> str:
    reference = at.references.full_batch
    sizes = reference.normalized_sizes(at.shares.sizes)
    stretches = "shard" if len(sizes) == len(at.shares.sizes) else "micro-batches"
    distance = reference.distance_from_true(at.step, at.full_batch)
    return (
        "BatchNorm: expected is the ghost batch, in which each rank normalizes its own "
        f"{stretches} ({', '.join(map(str, sizes))}). It is {distance:.2f} (relative L2) from "
        "full-batch training, which no gradient sync can change"
    )


def _expected(at: AtStep, index: int) -> torch.Tensor | None:
    """One parameter's gradient, None where one machine has none.

    Where a GradScaler's scale takes a shard's gradient beyond all numbers, the step is to be
    skipped for it, and what is expected of those elements is the shards' mean: no whole batch
    has their overflow.
    """
    full = at.full_batch.gradients[index]
    if full is None or at.training.loss_scale is None:
        return full
    interval = rounding_bound.mean_at(at).interval(index)
    if interval is None or bool(interval.mean.isfinite().all()):
        return full
    parts = real_parts(full)
    required = torch.where(interval.mean.isfinite(), parts, interval.mean.to(parts.dtype))
    return torch.view_as_complex(required) if full.is_complex() else required


def tolerance(at: AtStep, index: int) -> float:
    """The most by which a parameter's gradient may differ, as an L2 norm.

    What is rounded (or quantized) on its way differs from the mean of the shards by as much as
    the rounding bound allows, and that mean from the whole batch by what an exact sum would: both
    add up.
    """
    exact = _relative_to_batch(at, index)
    if at.contract.wire is None and (at.accepted is None or at.accepted.family != "quantized"):
        return exact
    interval = rounding_bound.mean_at(at).interval(index)
    return exact if interval is None else exact + float(interval.bound.norm())


def _relative_to_batch(at: AtStep, index: int) -> float:
    """The same of gradients that are neither rounded nor quantized on their way."""
    samples, layer = at.shares.samples, at.full_batch_layer
    relative = relative_tolerance(layer, samples, at.full_batch.positions, _splits(at))
    return tolerance_of(at.specs[index], layer, relative, at.module_scales, samples)


def _splits(at: AtStep) -> int:
    """How many additions between ranks a term of a split sum goes through, at most."""
    mesh = at.references.mesh
    if mesh is None:
        return 0
    layers = {spec.name.rpartition(".")[0] for spec in at.specs}
    return 2 * len(layers) * (mesh.world // mesh.data - 1)


def _refused(
    at: AtStep, expected: Gradients, tolerances: Sequence[float]
) -> dict[int, list[torch.Tensor]]:
    """What is recorded too far from the whole batch's gradients. It may be some more than the
    comparison, which decides, will refuse.
    """
    recorded = {
        index: [g for g in at.recorded_gradients(index) if not distance(g, full) <= allowed]
        for index, (full, allowed) in enumerate(zip(expected, tolerances, strict=True))
        if full is not None
    }
    return {index: too_far for index, too_far in recorded.items() if too_far}


def _on_other_sides(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> dict[int, torch.Tensor]:
    """What else gradients may be, where rounding puts some sample on another side of a kink: the
    shards' mean, where that is the whole batch's but for rounding; and in a mesh, where no rank has
    a shard, the whole batch's with these samples moved.
    """
    found = {}
    for index, too_far in refused.items():
        full, interval = expected[index], rounding_bound.mean_at(at).interval(index)
        if full is None or interval is None:
            continue
        shards = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        # Where the distance is NaN, as that of two infinities, the comparison decides.
        near = any(not distance(g, shards) > tolerances[index] for g in too_far)
        if near and _shards_are_the_batch(at, index):
            found[index] = shards
    left = [index for index in refused if index not in found]
    if at.references.mesh is None or not left:
        return found
    return found | kinks.beside_kinks(at, left)


def _rounding(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    other_sides: Mapping[int, torch.Tensor],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> dict[int, float]:
    """In a mesh: how far gradients may be off that are recorded too far from all that is expected,
    where the reference rounds them by as much.
    """
    found = {}
    for index, too_far in refused.items() if at.references.mesh is not None else ():
        right = [one for one in (expected[index], other_sides.get(index)) if one is not None]
        error = max(min(distance(g, one) for one in right) for g in too_far)
        if not error <= tolerances[index]:
            found[index] = gradient_rounding(at, index, error, tolerances[index])
    return found


def gradient_rounding(at: AtStep, index: int, error: float, bound: float) -> float:
    """The largest error of a parameter's gradient that may be rounding alone; 0 where `bound`, the
    most by which it may differ, holds.
    """
    return at.own_rounding.allows(lambda batch: batch.gradients[index], error=error, bound=bound)


def _shards_are_the_batch(at: AtStep, index: int) -> bool:
    """Whether the shards' mean is the whole batch's gradient, but for float32's rounding: in
    float64 they are the same, within the tolerance of full batch float64, from the same parameters.
    """
    try:
        in_double = at.in_double
        interval = rounding_bound.mean_at(in_double).interval(index)
        full = in_double.full_batch.gradients[index]
        if interval is None or full is None:
            return False
        mean = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        apart = float((mean - full).norm())
        return apart <= _relative_to_batch(in_double, index)
    except Exception:  # theirs: not every workload computes in float64
        return False


def outputs(at: AtStep) -> Outputs | None:
    """What the model returns for the samples of each data coordinate."""
    return model_outputs.expected(
        at, at.full_batch_layer, _splits(at), _ROUNDED.format("outputs are", "they are")
    )


def buffers(at: AtStep) -> AfterBatch | None:
    """What the forward pass leaves in buffers, of code that exchanges by itself."""
    if not at.exchanges_itself:
        return None
    relative = relative_tolerance(at.full_batch_layer, at.shares.samples, at.full_batch.positions)
    return AfterBatch(
        tuple(Near(wide(one), relative * norm(one)) for one in at.full_batch.buffers),
        tuple(tuple(shard.buffers) for shard in at.shards),
        tuple(at.trace.ranks),
    )


def loss(at: AtStep) -> MeanLoss:
    """The mean loss. Terms of both signs may cancel in it: where the ranks' loss is further from it
    than the narrower bound allows, the samples' losses are looked at, a forward pass for each.
    """
    expected = at.full_batch.loss
    if at.exchanges_itself and (times := _times_the_loss(at)) != 1:
        return replace(_near_loss(at, expected * times), remark=_TIMES_WORLD.format(times))
    return _near_loss(at, expected)


def _times_the_loss(at: AtStep) -> int:
    """By what a loss that exchanges by itself is multiplied: the number of ranks, where ranks that
    average gradients get back what each of them alone has. Its weights must be right all the same.
    """
    world, expected = at.references.whole.layout.world, at.full_batch.loss
    allowed = loss_tolerance(at.full_batch_layer, expected) * world
    times = expected * world
    return world if all(abs(one - times) <= allowed for one in recorded_losses(at)) else 1


def _near_loss(at: AtStep, expected: float) -> MeanLoss:
    layer = at.full_batch_layer
    apart = max((abs(loss - expected) for loss in recorded_losses(at)), default=0.0)
    bound = loss_tolerance(layer, expected)
    # What samples of a loss that compares them have alone are no terms of it.
    if bound < apart < math.inf and not at.exchanges_itself:
        magnitude = at.references.full_batch.loss_magnitude(at.step, expected)
        bound = loss_tolerance(layer, magnitude)
    refused = bound < apart < math.inf and (layer == IN_FLOAT32 or bool(at.exchanges_itself))
    if refused and at.references.mesh is not None:
        rounding = at.own_rounding.allows(lambda b: number(b.loss), error=apart, bound=bound)
        why = _ROUNDED.format("the loss is", "it is")
        form = Near(number(expected), bound, rounding=rounding, why=why)
        return MeanLoss(form, expected, bound, rounding)
    near = Near(number(expected), bound)
    if not refused or not _losses_are_the_batchs(at):
        return MeanLoss(near, expected, bound)
    by_shards = Near(number(_mean_loss(at, [shard.loss for shard in at.shards])), bound)
    return MeanLoss(Either(near, by_shards, excuse=_LONG_LOSS), expected, bound)


def recorded_losses(at: AtStep) -> list[float]:
    """The batch's loss by what ranks recorded: one number; in a mesh one of each place in a data
    coordinate, whose ranks have it together.
    """
    mesh, whole = at.references.mesh, at.references.whole
    if mesh is None:
        return [_mean_loss(at, [header.loss for header in at.shares.headers])]
    found = []
    for ranks in mesh.along("data"):
        headers = [whole.header(rank, at.step) for rank in ranks]
        if all(has_loss(header.loss) for header in headers):
            over = max(1, sum(header.loss_over for header in headers))
            found.append(sum(h.loss * h.loss_over for h in headers) / over)
    return found


def _mean_loss(at: AtStep, losses: Sequence[float]) -> float:
    """The ranks' losses, weighted by their samples."""
    pairs = zip(losses, at.shares.weights, strict=True)
    return sum(loss * weight / len(losses) for loss, weight in pairs)


def _losses_are_the_batchs(at: AtStep) -> bool:
    """Whether the shards' mean loss is the whole batch's, but for float32's rounding."""
    try:
        in_double = at.in_double
        whole = in_double.full_batch.loss
        apart = abs(_mean_loss(in_double, [shard.loss for shard in in_double.shards]) - whole)
        return apart <= loss_tolerance(IN_FLOAT64, whole)
    except Exception:  # theirs: not every workload computes in float64
        return False
