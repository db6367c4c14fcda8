"""The bitwise layer: the promised summation order, and everything that follows from recorded state.

Local results of a rank (its gradients, its loss, the optimizer step, its buffers) are recomputed
from its recording, and must be bit-identical. So must reduced gradients if an order is promised
(`order_exact.py`).

If the loop clips and each rank holds shards of the gradients, ranks add the squares of n numbers in
a different order than a single process. The relative error of such a sum grows like u sqrt(n) (as
in `full_batch.py`), and that of its root is half as large. So the update is recomputed for a norm
that is larger and smaller by this error, plus 8 u for the roundings of root, quotient and product.
The difference of the results is the tolerance of the update, as an L2 norm, in addition to one
rounding of the parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from distcheck.contract import DDPBuckets
from distcheck.judge.oracles import order_exact, rounding_bound, unpromised
from distcheck.judge.oracles.forms import (
    After,
    AllowedBuffers,
    EitherForm,
    ExactBits,
    GradientForms,
    Gradients,
    Limit,
    RankLosses,
    TensorsOfEachRank,
    Updates,
    WithinNorm,
    with_positive_zero,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.judge.oracles.rounding_bound import RoundingBound
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import as_float64, distance, every_nth_number, unit_roundoff
from distcheck.recordings.recording import Kind

_CLIPPED = (
    "the norm of all gradients is summed over the ranks' shards, in a different order than in a "
    "single process: the update is compared within the resulting rounding"
)
_ROOM = 8.0  # Derived: one rounding each for root, sum, quotient and product, and as many here


@dataclass(frozen=True)
class GradientsInPromisedOrder(GradientForms):
    """Gradients in the promised order; `mean` bounds the rounding of a mistaken sum."""

    gradients: Gradients
    mean: RoundingBound

    def of(self, index: int) -> ExactBits | None:
        return bits(self.gradients[index])

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """Return the elementwise rounding bound of a mistaken sum."""
        return self.mean.limit(index, own)

    def every(self, index: int, stride: int) -> torch.Tensor | None:
        """Return every `stride`-th compared number."""
        found = self.gradients[index]
        return None if found is None else every_nth_number(stride, found).double()


def bits(tensor: torch.Tensor | None) -> ExactBits | None:
    """Return the form of a recomputed tensor, if there is one."""
    return None if tensor is None else ExactBits(tensor)


def gradients(at: AtStep) -> GradientForms | TensorsOfEachRank | None:
    """Return the reduced gradients; each rank's local gradients if ranks step by these."""
    if (design := at.references.parameter_design) is not None:
        return None if design.warms_up(at.step) else local_gradients(at)
    order, resumed = at.contract.order, at.training.resume_before
    # The step before which the strategy received the model: the first, or a resumption.
    built_at = resumed if resumed is not None and at.step >= resumed else 0
    rebuilt_at = order.rebuilt_at if isinstance(order, DDPBuckets) else None
    # The step after whose backward DDP rebuilds its buckets.
    ordering_step = min(at.step, built_at + max(0, (rebuilt_at or 1) - 1))
    reduced = order_exact.expected_gradients(
        at.contract,
        at.case.backend,
        at.shard_gradients,
        weights=at.shares.weights,
        step=at.step - built_at,
        ready_order=at.trace.header(0, ordering_step).ready_order,
        like=at.references.parameters,
    )
    scale = at.shares.loss_scales[0]  # removed after synchronization, possibly a power of two
    if scale != 1.0:
        reduced = [g if g is None else g / scale for g in reduced]
    mean = rounding_bound.mean_of_step(at)
    return GradientsInPromisedOrder(at.shares, mean.computed, gradients=tuple(reduced), mean=mean)


def local_gradients(at: AtStep) -> TensorsOfEachRank:
    if at.references.unpromised:
        return TensorsOfEachRank(unpromised.local_gradient_forms(at))
    return TensorsOfEachRank(tuple(tuple(bits(g) for g in own) for own in at.shard_gradients))


def loss(at: AtStep) -> RankLosses:
    """Return the loss of every rank's shard."""
    exact = tuple(ExactBits(with_positive_zero(shard.loss)) for shard in at.shards)
    return unpromised.loss_forms(at, exact) if at.references.unpromised else RankLosses(exact)


def parameters(at: AtStep) -> Updates:
    """Return the optimizer's update of each rank, computed from its recording."""
    reference, step, design = at.references.update, at.step, at.references.parameter_design
    known: dict[bytes, After | None] = {}
    after = []
    for rank in range(reference.world):
        inputs = reference.input_digest(rank, step)
        if inputs not in known:
            known[inputs] = _recompute_update(at, rank)
        after.append(known[inputs])
    state = range(len(at.trace.layout.model.optimizer))
    return Updates(
        after=tuple(after),
        holders={i: reference.holders(step + 1, i) for i in state if reference.is_sharded(i)},
        combined=frozenset(() if design is None else design.tensors_at(step)),
    )


def _recompute_update(at: AtStep, rank: int) -> After | None:
    reference = at.references.update
    try:
        found = reference.run(rank, at.step)
        zeros = set[int]() if at.references.mesh else _zeros_for_none(at, rank)
        if zeros:
            moved = reference.run(rank, at.step, absent=zeros)
            found[Kind.PARAMETER] = moved[Kind.PARAMETER]
    except NotRecordedError:
        return None
    near = _tolerances(at, rank)
    return {
        kind: tuple(
            EitherForm(ExactBits(t), WithinNorm(t, near[kind][index]), excuse=_CLIPPED)
            if near and t is not None
            else bits(t)
            for index, t in enumerate(tensors)
        )
        for kind, tensors in found.items()
    }


def _tolerances(at: AtStep, rank: int) -> Mapping[Kind, Sequence[float]]:
    """Return the tolerance of each tensor after a rank's step; empty if bitwise."""
    if at.training.clip_norm is None or at.contract.optimizer_state != "cut":
        return {}
    unit = unit_roundoff(at.ingredients.dtype)
    relative = unit * (sqrt(sum(spec.elements for spec in at.specs)) / 2 + _ROOM)
    exact, more, less = (
        at.references.update.run(rank, at.step, clip_factor=factor)
        for factor in (1.0, 1.0 + relative, 1.0 - relative)
    )
    return {
        kind: [
            0.0
            if one is None
            else max(distance(one, other) for other in (above, below) if other is not None)
            + unit * float(as_float64(one).norm())
            for one, above, below in zip(exact[kind], more[kind], less[kind], strict=True)
        ]
        for kind in exact
    }


def _zeros_for_none(at: AtStep, rank: int) -> set[int]:
    """Return parameters with a zero gradient instead of none. The optimizer may keep state for
    them, but must not change them (momentum and weight decay do).
    """
    held = [at.trace.tensor(rank, Kind.GRADIENT, at.step, i) for i in range(len(at.specs))]
    zeros = {i for i, tensor in enumerate(held) if tensor is not None and not bool(tensor.any())}
    return zeros and {i for i in zeros if all(own[i] is None for own in at.shard_gradients)}


def buffers(at: AtStep) -> AllowedBuffers:
    """Return each rank's buffers after forward, which starts from the rank's buffers or, if nothing
    is promised, also from those of rank 0.
    """
    ways = []
    for rank, shard in enumerate(at.shards):
        of_rank = [tuple(shard.buffers)]
        if at.contract.takes_any_buffers and rank != 0:
            from_first = at.references.shards.run(rank, at.step, buffers_of=0)
            of_rank.append(tuple(from_first.buffers))
        ways.append(tuple(of_rank))
    return AllowedBuffers(tuple(ways), at.shares)
