"""What else a wrong gradient is: an earlier step's, a sum, another parameter's, a permutation."""

from collections.abc import Iterator, Sequence

import torch

from distcheck.judge.diagnosis.facts import Match
from distcheck.judge.diagnosis.measured import Measured
from distcheck.judge.diagnosis.step_view import StepView
from distcheck.machine.numerics import gamma, real_parts, unit_roundoff, wide

_MOST_SORTED = 1 << 20
_MOST_OTHERS = 64
# Two samples of one distribution, sorted, come closer the more there are of them: to 1e-3 of their
# norm for a million. Chosen: a bound that is wider than a tenth of that proves no permutation.
_SHARPEST = 1e-4


def matches_of(
    view: StepView,
    earlier: Sequence[StepView],
    measured: list[Measured],
    step_gamma: float,
) -> Iterator[Match]:
    """Every match of a wrong gradient, within the bound of what it is taken for."""
    for one in measured:
        if one.wrong and bool(one.interval.mean.isfinite().all()):
            yield from _earlier(view, earlier, one, step_gamma)
            yield from _others(one, measured)
            yield from _mixed(view, one, measured, step_gamma)
    yield from permuted(measured)


def _earlier(
    view: StepView,
    earlier: Sequence[StepView],
    one: Measured,
    step_gamma: float,
) -> Iterator[Match]:
    """Against the means of earlier steps, their sums with this one's, and what a rank held then."""
    total, allowed = one.interval.mean, _size(view, one.index)
    for past in earlier:
        interval = past.interval(one.index)
        if interval is None or not bool(interval.mean.any()):
            return
        total, allowed = total + interval.mean, allowed + _size(past, one.index)
        candidates = [
            ("earlier", interval.mean, float(interval.bound.norm())),
            ("sum", total, step_gamma * allowed),
        ]
        for rank in one.wrong:
            held = past.reduced(rank, one.index)
            held = None if held is None else real_parts(held)
            own = list(candidates)
            if held is not None and bool(held.any()):
                limit = _size(view, one.index) + float(held.double().norm())
                own.append(("added", one.interval.mean + held.double(), step_gamma * limit))
                # What some ranks did not clear is in the mean of all.
                ranks = len(view.weights)
                own += [
                    ("left", one.interval.mean + held.double() * k / ranks, step_gamma * limit)
                    for k in range(1, ranks)
                ]
            for kind, expected, bound in own:
                distance = float((one.result(rank) - expected).norm())
                if distance <= bound:
                    yield Match(
                        kind=kind, rank=rank, parameter=one.name, distance=distance, bound=bound,
                        step=past.step,
                    )  # fmt: skip


def _size(view: StepView, index: int) -> float:
    """What the terms of a mean add up to, as a norm."""
    size = 0.0
    for rank, (weight, factor) in enumerate(zip(view.weights, view.unscaled, strict=True)):
        gradient = view.local(rank, index)
        if gradient is not None and factor:
            size += weight / len(view.weights) / abs(factor) * float(wide(gradient).norm())
    return size


def _others(one: Measured, measured: list[Measured]) -> Iterator[Match]:
    """Against the means of other parameters with as many elements."""
    alike = [m for m in measured if m.name != one.name and m.elements == one.elements]
    for other in alike[:_MOST_OTHERS]:
        mean = other.interval.mean
        if not bool(mean.any()):
            continue
        bound = float(other.interval.bound.norm())
        for rank in one.wrong:
            distance = float((one.result(rank).reshape(-1) - mean.reshape(-1)).norm())
            if distance <= bound:
                yield Match(
                    kind="parameter", rank=rank, parameter=one.name, distance=distance,
                    bound=bound, other=other.name,
                )  # fmt: skip


def _mixed(
    view: StepView, one: Measured, measured: list[Measured], step_gamma: float
) -> Iterator[Match]:
    """Against means to which some ranks gave their gradient of another parameter.

    With d_k = share_k * (other's gradient on rank k - this one's), the result is the mean plus the
    sum of d_k over those ranks: least squares says which, and the sum is then tried as it is.
    """
    alike = [m for m in measured if m.name != one.name and m.elements == one.elements]
    world = one.world
    if world < 2 or one.elements > _MOST_SORTED or one.elements <= world:
        return
    shares = [weight / world for weight in view.weights]
    own = torch.stack([one.shard(rank).reshape(-1) for rank in range(world)], dim=1)
    own_norms = own.norm(dim=0).tolist()
    rests = torch.stack(
        [(one.result(rank) - one.interval.mean).reshape(-1) for rank in one.wrong], dim=1
    )
    at_once = max(1, _MOST_SORTED // own.numel())
    for first in range(0, min(len(alike), _MOST_OTHERS), at_once):
        others = alike[:_MOST_OTHERS][first : first + at_once]
        theirs = torch.stack(
            [
                torch.stack([m.shard(rank).reshape(-1) for rank in range(world)], dim=1)
                for m in others
            ]
        )
        gaps = (theirs - own) * torch.tensor(shares, dtype=own.dtype, device=own.device)
        solved = torch.linalg.lstsq(gaps, rests.expand(len(others), *rests.shape)).solution.round()
        norms = theirs.norm(dim=1).tolist()
        for other, gap, taken_by, norm in zip(others, gaps, solved, norms, strict=True):
            size = sum(s * (o + p) for s, o, p in zip(shares, norm, own_norms, strict=True))
            for rank, taken, rest in zip(one.wrong, taken_by.T, rests.T, strict=True):
                ranks = tuple(taken.nonzero().reshape(-1).tolist())
                if not 0 < len(ranks) < world or not bool((taken[list(ranks)] == 1).all()):
                    continue
                distance, bound = float((gap @ taken - rest).norm()), step_gamma * size
                if distance <= bound:
                    yield Match(
                        kind="mixed", rank=rank, parameter=one.name, distance=distance,
                        bound=bound, other=other.name, ranks=ranks,
                    )  # fmt: skip


def permuted(measured: list[Measured]) -> Iterator[Match]:
    """The elements that are wrong where they stand, sorted. Sorting both brings no two vectors
    further apart, and what is then within a bound has norms within it: the norms, which any order
    leaves alike, rule most out without sorting anything.

    Those that are right where they stand do not count: their bounds would hide small elements that
    were dropped. Twice the bounds of the others: one that a permutation brought onto an equal one
    is taken for one that stayed.
    """
    elements = sum(m.elements for m in measured)
    wrong = sorted({rank for m in measured for rank in m.wrong})
    if elements > _MOST_SORTED or not wrong:
        return
    in_place = torch.cat([m.interval.mean.reshape(-1) for m in measured])
    bounds = torch.cat([m.interval.bound.reshape(-1) for m in measured])
    bound = float(bounds.norm())
    norm = float(in_place.norm())
    if bound > _SHARPEST * norm:
        return
    # The two norms are themselves off by their roundings, in float64 and in any order.
    reach = bound + gamma(2 * elements, unit_roundoff(torch.float64)) * norm
    for rank in wrong:
        results = torch.cat([m.result(rank).reshape(-1) for m in measured])
        if float((results - in_place).norm()) <= bound:
            continue  # only single elements are off, and they have not changed places
        if abs(float(results.norm()) - norm) > reach:
            continue
        moved = (results - in_place).abs() > bounds
        allowed = 2 * float(bounds[moved].norm())
        distance = float((results[moved].sort().values - in_place[moved].sort().values).norm())
        if distance <= allowed:
            for m in measured:
                if rank in m.wrong:
                    yield Match(
                        kind="permuted", rank=rank, parameter=m.name, distance=distance,
                        bound=allowed,
                    )  # fmt: skip
