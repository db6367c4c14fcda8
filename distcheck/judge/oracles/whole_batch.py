"""S32 and S64: the whole batch of a step in one process.

The reference and its tolerances are in `full_batch.py`. Here is what goes into them at a step: what
a shorter wire or a grid widens, and which gradients are taken shard by shard, at a kink.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from distcheck.judge.oracles import any_order, kinks, model_outputs
from distcheck.judge.oracles.any_order import AnyOrder
from distcheck.judge.oracles.at_step import AtStep
from distcheck.judge.oracles.forms import (
    Either,
    GradientForms,
    Gradients,
    Limit,
    MeanLoss,
    Near,
    Outputs,
)
from distcheck.judge.oracles.full_batch import (
    FullBatch,
    loss_tolerance,
    relative_tolerance,
    underflow,
)
from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import real_parts
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

_LONG_LOSS = (
    "at some steps the loss adds up so many terms that its rounding is beyond the tolerance: there "
    "it is the mean of the ranks' own losses, which in float64 is the whole batch's"
)


@dataclass(frozen=True)
class WholeBatch(GradientForms):
    """The gradients of one step's whole batch. `by_shards` has those that rounding puts on another
    side of a kink, taken as the ranks take their samples. `rounding` has how far those may be off
    that round by more than their tolerances in one process as well.
    """

    gradients: Gradients
    tolerances: tuple[float, ...]
    by_shards: Mapping[int, torch.Tensor]
    rounding: Mapping[int, float]
    nan_is_expected: bool

    def of(self, index: int) -> Near | Either | None:
        """What a parameter's gradient may be."""
        expected, tolerance = self.gradients[index], self.tolerances[index]
        if expected is None:
            return None
        rounding = self.rounding.get(index, 0.0)
        near = Near(
            expected,
            tolerance,
            self.nan_is_expected,
            rounding,
            _ROUNDED.format("gradients are", "they are"),
        )
        if index not in self.by_shards:
            return near
        return Either(near, Near(self.by_shards[index], tolerance), excuse=_AT_A_KINK)

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """The bound of the L2 norm."""
        return lambda stride: self.tolerances[index]


def gradients(at: AtStep) -> WholeBatch:
    """The synchronised gradients of a step."""
    mean = _Mean(at)
    indices = range(len(at.specs))
    expected = tuple(_expected(at, mean, index) for index in indices)
    tolerances = tuple(_tolerance(at, index, mean) for index in indices)
    in_float32 = layer_of(at) == IN_FLOAT32
    beside = _beside(at, mean, expected, tolerances) if in_float32 else {}
    return WholeBatch(
        at.shares,
        at.computed_where_unseen if at.references.mesh is None else (),
        gradients=expected,
        tolerances=tolerances,
        by_shards=beside,
        rounding=_rounding(at, expected, tolerances, beside) if in_float32 else {},
        nan_is_expected=at.nan_is_expected,
        closing=_of_ghost(at) if at.step == 0 and at.full_batch.ghost else "",
    )


def _of_ghost(at: AtStep) -> str:
    reference = at.references.full_batch
    sizes = reference.normalised_sizes(at.shares.sizes)
    stretches = "shard" if len(sizes) == len(at.shares.sizes) else "micro-batches"
    distance = reference.distance_from_true(at.step, at.full_batch)
    return (
        "BatchNorm: expected is the ghost batch, in which each rank normalises its own "
        f"{stretches} ({', '.join(map(str, sizes))}). It is {distance:.2f} (relative L2) from "
        "full-batch training, which no gradient sync can change"
    )


class _Mean:
    """R of a step, which takes the ranks' own parts, where something needs it."""

    def __init__(self, at: AtStep) -> None:
        self._at = at
        self._known: AnyOrder | None = None

    def interval(self, index: int) -> Interval | None:
        """Mean and bound of one parameter. Raises NotBoundedError."""
        self._known = self._known or any_order.mean_at(self._at)
        return self._known.interval(index)


def _expected(at: AtStep, mean: _Mean, index: int) -> torch.Tensor | None:
    """One parameter's gradient, None where one machine has none.

    Where a GradScaler's scale takes a shard's gradient beyond all numbers, the step is to be
    skipped for it, and what is expected of those elements is the shards' mean: no whole batch
    has their overflow.
    """
    full = at.full_batch.gradients[index]
    if full is None or at.training.loss_scale is None:
        return full
    interval = mean.interval(index)
    if interval is None or bool(interval.mean.isfinite().all()):
        return full
    parts = real_parts(full)
    required = torch.where(interval.mean.isfinite(), parts, interval.mean.to(parts.dtype))
    return torch.view_as_complex(required) if full.is_complex() else required


def tolerance(at: AtStep, index: int) -> float:
    """The most by which one parameter's gradient may differ, as an L2 norm."""
    return _tolerance(at, index, _Mean(at))


def layer_of(at: AtStep) -> str:
    """Which of the two layers a step's dtype makes it."""
    return IN_FLOAT64 if at.ingredients.dtype is torch.float64 else IN_FLOAT32


def _tolerance(at: AtStep, index: int, mean: _Mean) -> float:
    """The most by which a parameter's gradient may differ, as an L2 norm.

    What is rounded (or quantised) on its way differs from the mean of the shards by as much as
    R allows, and that mean from the whole batch by what an exact sum would: both add up.
    """
    exact = _relative_to_batch(at, index)
    if at.contract.wire is None and (at.accepted is None or at.accepted.family != "quantised"):
        return exact
    interval = mean.interval(index)
    return exact if interval is None else exact + float(interval.bound.norm())


def _relative_to_batch(at: AtStep, index: int) -> float:
    """The same of gradients that are neither rounded nor quantised on their way."""
    spec, samples, layer = at.specs[index], at.shares.samples, layer_of(at)
    scale = at.module_scales.get(spec.name.rpartition(".")[0], 0.0)
    relative = relative_tolerance(layer, samples, at.full_batch.positions, _splits(at))
    return relative * scale + underflow(layer, samples, spec.elements)


def _splits(at: AtStep) -> int:
    """How many additions between ranks a term of a split sum goes through, at most."""
    mesh = at.references.mesh
    if mesh is None:
        return 0
    layers = {spec.name.rpartition(".")[0] for spec in at.specs}
    return 2 * len(layers) * (mesh.world // mesh.data - 1)


def _by_shards(
    at: AtStep, mean: _Mean, expected: Gradients, tolerances: tuple[float, ...]
) -> dict[int, torch.Tensor]:
    """Gradients that are recorded too far from the whole batch's, and near enough to the shards'
    mean, where that mean is the whole batch's but for rounding. It may have some more than the
    comparison, which decides, will refuse.
    """
    found = {}
    for index, full in enumerate(expected):
        if full is None:
            continue
        recorded = at.recorded_gradients(index)
        refused = [g for g in recorded if not _distance(g, full) <= tolerances[index]]
        interval = mean.interval(index) if refused else None
        if interval is None:
            continue
        shards = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        # Where the distance is NaN, as that of two infinities, the comparison decides.
        near = any(not _distance(g, shards) > tolerances[index] for g in refused)
        if near and _shards_are_the_batch(at, index):
            found[index] = shards
    return found


def _beside(
    at: AtStep, mean: _Mean, expected: Gradients, tolerances: tuple[float, ...]
) -> dict[int, torch.Tensor]:
    """What else gradients may be, where rounding puts some sample on another side of a kink: taken
    shard by shard, and in a mesh, where no rank has a shard, with these samples moved.
    """
    found = _by_shards(at, mean, expected, tolerances)
    if at.references.mesh is None:
        return found
    refused = [
        index
        for index, full in enumerate(expected)
        if full is not None
        and index not in found
        and any(not _distance(g, full) <= tolerances[index] for g in at.recorded_gradients(index))
    ]
    return found | (kinks.beside_kinks(at, refused) if refused else {})


def _rounding(
    at: AtStep,
    expected: Gradients,
    tolerances: tuple[float, ...],
    beside: Mapping[int, torch.Tensor],
) -> dict[int, float]:
    """In a mesh: how far gradients may be off that are recorded too far from all that is expected,
    where the reference rounds them by as much.
    """
    if at.references.mesh is None:
        return {}
    found = {}
    for index, full in enumerate(expected):
        if full is None:
            continue
        right = [full, beside[index]] if index in beside else [full]
        nearest = [min(_distance(g, r) for r in right) for g in at.recorded_gradients(index)]
        error = max(nearest, default=0.0)
        if not error <= tolerances[index]:
            found[index] = gradient_rounding(at, index, error, tolerances[index])
    return found


def gradient_rounding(at: AtStep, index: int, error: float, bound: float) -> float:
    """The largest error of a parameter's gradient that may be rounding alone; 0 where `bound`, the
    most by which it may differ, holds.
    """
    return at.own_rounding.allows(lambda batch: batch.gradients[index], error=error, bound=bound)


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    wanted = real_parts(expected).to(actual.device).double()
    return float((real_parts(actual).double() - wanted).norm())


def _shards_are_the_batch(at: AtStep, index: int) -> bool:
    """Whether the shards' mean is the whole batch's gradient, but for float32's rounding: in
    float64 they are the same, within S64's tolerance, from the same parameters.
    """
    try:
        wide = at.in_double
        interval = any_order.mean_at(wide).interval(index)
        full = wide.full_batch.gradients[index]
        if interval is None or full is None:
            return False
        mean = torch.view_as_complex(interval.mean) if full.is_complex() else interval.mean
        apart = float((mean - full).norm())
        return apart <= _relative_to_batch(wide, index)
    except Exception:  # theirs: not every workload computes in float64
        return False


def outputs(at: AtStep) -> Outputs | None:
    """What the model returns for the samples of each data coordinate."""
    return model_outputs.expected(
        at, layer_of(at), _splits(at), _ROUNDED.format("outputs are", "they are")
    )


def loss(at: AtStep) -> MeanLoss:
    """The mean loss. Terms of both signs may cancel in it: where the ranks' loss is further from it
    than the narrower bound allows, the samples' losses are looked at, a forward pass for each.
    """
    expected, layer = at.full_batch.loss, layer_of(at)
    apart = max((abs(loss - expected) for loss in recorded_losses(at)), default=0.0)
    bound = loss_tolerance(layer, expected)
    if bound < apart < math.inf:
        magnitude = at.references.full_batch.loss_magnitude(at.step, expected)
        bound = loss_tolerance(layer, magnitude)
    refused = bound < apart < math.inf and layer == IN_FLOAT32
    if refused and at.references.mesh is not None:
        rounding = at.own_rounding.allows(_loss_of, error=apart, bound=bound)
        return MeanLoss(
            expected, bound, rounding=rounding, why=_ROUNDED.format("the loss is", "it is")
        )
    if not refused or not _losses_are_the_batchs(at):
        return MeanLoss(expected, bound)
    beside = _mean_loss(at, [shard.loss for shard in at.shards])
    return MeanLoss(expected, bound, beside, excuse=_LONG_LOSS)


def _loss_of(batch: FullBatch) -> torch.Tensor:
    return torch.tensor(batch.loss, dtype=torch.float64)


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
        wide = at.in_double
        whole = wide.full_batch.loss
        apart = abs(_mean_loss(wide, [shard.loss for shard in wide.shards]) - whole)
        return apart <= loss_tolerance(IN_FLOAT64, whole)
    except Exception:  # theirs: not every workload computes in float64
        return False
