"""What the comparisons of a step would have shown, from the bound that each of them has.

The parts of a mean are the ranks' own gradients as they were recorded; where a rank's were not
seen, those that were computed again. Nothing is trained for it.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.rounded_sums import rounds
from distcheck.judge.checks.simplest_mistakes import Parts, is_complete, shown_by
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.machine.numerics import real_parts
from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, ROUNDING
from distcheck.records.mistakes import MISTAKES, NOTHING, Shown
from distcheck.training.traces.layout import Kind

# Derived: relative to a sum of absolute values, where bits are compared; 2^13 u of float64 has room
# for the roundings of 8,000 ranks.
_EXACT = 2.0**-40


def _every(stride: int, tensor: torch.Tensor) -> torch.Tensor:
    """Every so-many-th number [n] of a tensor; a complex element is two."""
    return real_parts(tensor).reshape(-1)[::stride]


def of_mean(
    evidence: Evidence, expectation: StepExpectation, layer: str, index: int
) -> Shown | None:
    """What comparing one parameter's synchronised gradient by `layer` would show. None where one
    rank alone has data: there is nothing to exchange.
    """
    if layer not in (BITWISE, ROUNDING):
        return _of_mean(evidence, expectation, layer, index)
    if index not in expectation.shown:
        expectation.shown[index] = _of_mean(evidence, expectation, ROUNDING, index)
    found = expectation.shown[index]
    # X asks for more than R does: what R's bound shows, bits show.
    if layer == ROUNDING or found is None or is_complete(found, evidence.with_data):
        return found
    return _of_mean(evidence, expectation, BITWISE, index)


def _of_mean(
    evidence: Evidence, expectation: StepExpectation, layer: str, index: int
) -> Shown | None:
    ranks = evidence.with_data
    if len(ranks) < 2:
        return None
    seen = own_gradients(expectation, index)
    present = next((gradient for gradient in seen if gradient is not None), None)
    if present is None:
        return NOTHING
    if present.numel() == 0:
        return msgspec.structs.replace(NOTHING, absent=False)
    own = [torch.zeros_like(present) if g is None else g for g in seen]
    per_rank = partial(torch.tensor, dtype=torch.float64, device=present.device)
    shares = per_rank(expectation.shares)
    if not bool(shares.isfinite().all()):
        return NOTHING  # a loss that was multiplied by zero: no rank's part is known
    bound_at = _bound(expectation, layer, index, own)
    bits = expectation.order_exact[index] if layer == BITWISE else None

    def parts_at(stride: int) -> Parts:
        gradients = torch.stack([_every(stride, gradient).double() for gradient in own])
        return Parts(
            gradients=gradients,
            shares=shares,
            # Where a rank keeps its gradient, a GradScaler's scale is taken back all the same.
            own=1.0 / per_rank(expectation.loss_scales),
            weights=per_rank(expectation.weights) / len(ranks),
            bound=bound_at(stride),
            expected=None if bits is None else _every(stride, bits).double(),
        )

    step, trace, first = expectation.step, evidence.trace, ranks[0]
    before = trace.tensor(first, Kind.GRADIENT, step - 1, index) if step else None
    found = shown_by(
        parts_at,
        elements=real_parts(present).numel(),
        ranks=ranks,
        before=before,
        others=_others(evidence, step, index),
    )
    there = [g is not None and bool(g.any()) for g in seen]
    return msgspec.structs.replace(
        found,
        absent_on_some=any(g is None for g in seen),
        zero_on_some=any(there) and not all(there),
    )


def own_gradients(expectation: StepExpectation, index: int) -> list[torch.Tensor | None]:
    """What backward left on each rank, as it was recorded where it was seen on every rank, and
    otherwise computed again.
    """
    trace = expectation.trace
    seen = [
        trace.tensor(rank, Kind.LOCAL_GRADIENT, expectation.step, index)
        for rank in range(trace.layout.world)
    ]
    if all(gradient is not None for gradient in seen):
        return seen
    return [shard.gradients[index] for shard in expectation.shards]


def _bound(
    expectation: StepExpectation, layer: str, index: int, own: Sequence[torch.Tensor]
) -> Callable[[int], torch.Tensor | float]:
    """The bound in force, elementwise over every k-th element, or for the L2 norm."""
    if layer in (IN_FLOAT32, IN_FLOAT64):
        tolerance = expectation.full_batch_tolerance(layer, index)
        return lambda stride: tolerance

    def elementwise(stride: int) -> torch.Tensor:
        if layer == "lattice" and not rounds(expectation):
            pairs = zip(expectation.shares, own, strict=True)
            sizes = [abs(share) * _every(stride, g).double().abs() for share, g in pairs]
            return torch.stack(sizes).sum(0) * _EXACT
        # The lattice asks for R where sums are rounded on the way.
        found = expectation.interval(index, parts=own, take=partial(_every, stride))
        assert found is not None
        return found.bound

    return elementwise


def _others(evidence: Evidence, step: int, index: int) -> list[torch.Tensor]:
    """The recorded gradients of the other parameters of this one's shape."""
    specs = evidence.trace.layout.model.parameters
    alike = [
        at
        for at, spec in enumerate(specs)
        if at != index and (spec.shape, spec.dtype) == (specs[index].shape, specs[index].dtype)
    ]
    rank = evidence.with_data[0]
    found = [evidence.trace.tensor(rank, Kind.GRADIENT, step, at) for at in alike]
    return [tensor for tensor in found if tensor is not None]


def of_projection(evidence: Evidence, expectation: StepExpectation, index: int) -> Shown | None:
    """The same where a low-rank exchange is accepted: what each mistake leaves is tried on the
    comparison itself, projected on the directions that rank 0's result has.
    """
    ranks, trace, step = evidence.with_data, evidence.trace, expectation.step
    given = expectation.carried(index)
    result = trace.tensor(ranks[0], Kind.GRADIENT, step, index)
    if len(ranks) < 2:
        return None
    if given is None or result is None or not result.numel():
        return NOTHING
    own = [torch.zeros_like(result) if g is None else g for g in own_gradients(expectation, index)]
    scaled = [share * g.double() for share, g in zip(expectation.shares, own, strict=True)]
    keep = _projection(result, expectation)

    def fails(left: torch.Tensor) -> bool:
        return bool(expectation.projected(left.to(result.dtype), given).why)

    world = len(ranks)
    shown = {
        "no-sync": tuple(r for r, g in zip(ranks, own, strict=True) if fails(g)),
        "lost-rank": tuple(
            r for r, part in zip(ranks, scaled, strict=True) if fails(keep(given.mean - part))
        ),
        "doubled-rank": tuple(
            r for r, part in zip(ranks, scaled, strict=True) if fails(keep(given.mean + part))
        ),
        "times-world": (0,) if fails(keep(given.mean) * world) else (),
        "divided-by-world": (0,) if fails(keep(given.mean) / world) else (),
    }
    before = trace.tensor(ranks[0], Kind.GRADIENT, step - 1, index) if step else None
    if before is not None:
        shown["stale"] = (0,) if fails(before) else ()
    counts = any(shown[name] for name in shown if MISTAKES[name].of_exchange)
    return Shown(
        shown=shown,
        scale="inf",
        zero=not any(bool(g.any()) for g in own),
        alike=all(torch.equal(g, own[0]) for g in own),
        steps=int(counts),
    )


def _projection(
    result: torch.Tensor, expectation: StepExpectation
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the exchange keeps of a tensor, as far as its result shows: its columns' own space."""
    accepted = expectation.accepted
    assert accepted is not None
    rows = result.shape[0] if result.dim() else 1
    if result.dim() < 2 or min(rows, result.numel() // rows) <= accepted.amount:
        return lambda tensor: tensor
    columns, values, _ = torch.linalg.svd(result.double().reshape(rows, -1), full_matrices=False)
    # Measured allowance: beyond its rank, a product of that rank in float32 was measured to have
    # singular values of up to 4e-8 of the first. Decides only which mistakes are tried.
    if float(values[accepted.amount]) > 1e-3 * float(values[0]):
        return lambda tensor: tensor  # this step compressed nothing
    basis = columns[:, : accepted.amount]
    return lambda tensor: (basis @ (basis.T @ tensor.reshape(rows, -1))).reshape(tensor.shape)


def of_average(
    ranks: Sequence[int],
    updates: Sequence[torch.Tensor],
    bound: torch.Tensor,
    before: torch.Tensor | None,
) -> Shown | None:
    """What comparing an average of the ranks' parameters would show."""
    if len(ranks) < 2:
        return None
    even = updates[0].new_full((len(ranks),), 1.0 / len(ranks), dtype=torch.float64)

    def parts_at(stride: int) -> Parts:
        return Parts(
            gradients=torch.stack([_every(stride, update).double() for update in updates]),
            shares=even,
            own=torch.ones_like(even),
            weights=even,
            bound=bound.reshape(-1)[::stride],
        )

    elements = real_parts(updates[0]).numel()
    return (
        shown_by(parts_at, elements=elements, ranks=ranks, before=before) if elements else NOTHING
    )
