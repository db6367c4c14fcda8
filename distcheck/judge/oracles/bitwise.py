"""The bitwise layer: the promised order of summation, and whatever follows from recorded state
alone.

What a rank computes by itself (its own gradients, its loss, the optimizer's step, its buffers) is
computed again from what it recorded, and must have the same bits. So must the synchronized
gradients where an order is promised (`order_exact.py`).

Where the loop clips and each rank holds pieces of the gradients, ranks add up the squares of n
numbers in another order than one process does. The relative error of such a sum grows like
u sqrt(n) (as in `full_batch.py`), and that of its root is half of that. So the update is computed
again for a norm that is larger and smaller by so much, with 8 u of room for the roundings of root,
quotient and product. What the results differ by is how far the update may be from the one that is
expected, as an L2 norm, with one rounding of the parameters themselves beside.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from distcheck.contract import DDPBuckets
from distcheck.judge.oracles import order_exact, rounding_bound, unpromised
from distcheck.judge.oracles.forms import (
    After,
    Bits,
    BufferWays,
    EachItsOwn,
    Either,
    GradientForms,
    Gradients,
    Limit,
    Near,
    RankLosses,
    Updates,
    number,
)
from distcheck.judge.oracles.references import AtStep
from distcheck.judge.oracles.rounding_bound import RoundingBound
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import distance, every, unit_roundoff, wide
from distcheck.recordings.recording import Kind

_CLIPPED = (
    "the norm of all gradients is added up over the ranks' pieces, in another order than in one "
    "process: the update is compared within what that may change"
)
_ROOM = 8.0  # Derived: one rounding each for root, sum, quotient and product, and as many here


@dataclass(frozen=True)
class InOrder(GradientForms):
    """The gradients in the promised order; `mean` says what a mistaken sum may be rounded by."""

    gradients: Gradients
    mean: RoundingBound

    def of(self, index: int) -> Bits | None:
        return bits(self.gradients[index])

    def limit(self, index: int, own: list[torch.Tensor]) -> Limit:
        """How far a mistaken sum may be from its exact value, elementwise."""
        return self.mean.limit(index, own)

    def every(self, index: int, stride: int) -> torch.Tensor | None:
        """Every so-many-th of the numbers that are compared."""
        found = self.gradients[index]
        return None if found is None else every(stride, found).double()


def bits(tensor: torch.Tensor | None) -> Bits | None:
    """A tensor that is computed again, if there is one."""
    return None if tensor is None else Bits(tensor)


def gradients(at: AtStep) -> GradientForms | EachItsOwn:
    """The synchronized gradients; each rank's own where ranks may train by themselves."""
    if at.references.averages is not None:
        return local_gradients(at)
    order, resumed = at.contract.order, at.training.resume_before
    # The step before which the strategy was given the model: the first, or a resumption.
    built_at = resumed if resumed is not None and at.step >= resumed else 0
    rebuilt_at = order.rebuilt_at if isinstance(order, DDPBuckets) else None
    # The step whose backward DDP's buckets are rebuilt after.
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
    scale = at.shares.loss_scales[0]  # taken back after the exchange, which a power of two may be
    if scale != 1.0:
        reduced = [g if g is None else g / scale for g in reduced]
    mean = rounding_bound.mean_at(at)
    return InOrder(at.shares, mean.computed, gradients=tuple(reduced), mean=mean)


def local_gradients(at: AtStep) -> EachItsOwn:
    """What every rank's backward leaves."""
    if at.references.unpromised:
        return EachItsOwn(unpromised.own(at))
    return EachItsOwn(tuple(tuple(bits(g) for g in own) for own in at.shard_gradients))


def loss(at: AtStep) -> RankLosses:
    """The loss of every rank's own shard."""
    losses = tuple(shard.loss for shard in at.shards)
    exact = tuple(Bits(number(loss)) for loss in losses)
    if not at.references.unpromised:
        return RankLosses(exact, losses)
    return unpromised.losses(at, exact)


def parameters(at: AtStep) -> Updates:
    """What the optimizer makes of what each rank recorded."""
    reference, step, averages = at.references.update, at.step, at.references.averages
    known: dict[bytes, After | None] = {}
    after = []
    for rank in range(reference.world):
        inputs = reference.input_digest(rank, step)
        if inputs not in known:
            known[inputs] = _updated(at, rank)
        after.append(known[inputs])
    state = range(len(at.trace.layout.model.optimizer))
    return Updates(
        after=tuple(after),
        holders={i: reference.holders(step + 1, i) for i in state if reference.is_sharded(i)},
        averaged=averages is not None and averages.at(step),
    )


def _updated(at: AtStep, rank: int) -> After | None:
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
            Either(Bits(t), Near(t, near[kind][index]), excuse=_CLIPPED)
            if near and t is not None
            else bits(t)
            for index, t in enumerate(tensors)
        )
        for kind, tensors in found.items()
    }


def _tolerances(at: AtStep, rank: int) -> Mapping[Kind, Sequence[float]]:
    """How far each tensor may be from what is expected after a rank's step; nothing where bits are
    expected.
    """
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
            + unit * float(wide(one).norm())
            for one, above, below in zip(exact[kind], more[kind], less[kind], strict=True)
        ]
        for kind in exact
    }


def _zeros_for_none(at: AtStep, rank: int) -> set[int]:
    """Parameters that have a gradient of zero where they should have none. The optimizer may keep
    state for them; it must not move them (momentum and weight decay do).
    """
    held = [at.trace.tensor(rank, Kind.GRADIENT, at.step, i) for i in range(len(at.specs))]
    zeros = {i for i, tensor in enumerate(held) if tensor is not None and not bool(tensor.any())}
    return zeros and {i for i in zeros if all(own[i] is None for own in at.shard_gradients)}


def buffers(at: AtStep) -> BufferWays:
    """What each rank's forward pass leaves, from its own buffers; where none is promised, or else
    from rank 0's.
    """
    ways = []
    for rank, shard in enumerate(at.shards):
        of_rank = [tuple(shard.buffers)]
        if at.contract.takes_any_buffers and rank != 0:
            from_first = at.references.shards.run(rank, at.step, buffers_of=0)
            of_rank.append(tuple(from_first.buffers))
        ways.append(tuple(of_rank))
    return BufferWays(tuple(ways), at.shares)
