"""What the single elements of a wrong gradient are, and their roundings. Runs in a judge."""

from math import sqrt
from typing import NamedTuple

import torch

from distcheck.judge.diagnosis.measured import Measured
from distcheck.machine.numerics import gamma, unit_roundoff

Counts = tuple[int, ...]  # by rank

_SHORTER = ("float32", "float16", "bfloat16")
# Derived: one rounding has an error of at least u / (4 sqrt(3)) in the mean square (half the
# spacing at the top of a binade, uniform), W of them that are added up 1 / sqrt(W) of that; a third
# is room.
_LEAST_ROUNDING = 0.05


def mixture(measured: Measured, unit: float) -> tuple[Counts, Counts, Counts]:
    """Per rank: elements that are the mean, the rank's own, either."""
    counts: list[tuple[int, int, int]] = []
    interval = measured.interval
    for rank in range(measured.world):
        result, own = measured.result(rank), measured.left(rank)
        mean = (result - interval.mean).abs() <= interval.bound
        alone = (result - own).abs() <= gamma(4, unit) * own.abs()
        counts.append((int(mean.sum()), int(alone.sum()), int((mean | alone).sum())))
    means, owns, eithers = zip(*counts, strict=True)
    return means, owns, eithers


def kinds(measured: Measured, unit: float) -> tuple[tuple[str, Counts], ...]:
    """Per kind and rank: elements that are the mean, or are of that kind."""
    world, interval = measured.world, measured.interval
    owns = [measured.left(rank) for rank in range(world)]
    shared = [share * own for share, own in zip(measured.shares, owns, strict=True)]
    total = torch.stack(shared).sum(0) * world
    reach = gamma(4, unit)
    any_ranks = [(one, reach * one.abs()) for one in (*owns, *shared)]
    found: dict[str, list[int]] = {}
    for rank in range(world):
        result, divided = measured.result(rank), owns[rank] / world
        mean = (result - interval.mean).abs() <= interval.bound
        one_of_them = torch.zeros_like(mean)
        for one, bound in any_ranks:
            one_of_them |= (result - one).abs() <= bound
        for kind, same in (
            ("zero", result == 0),
            ("own / W", (result - divided).abs() <= reach * divided.abs()),
            ("sum", (result - total).abs() <= world * interval.bound),
            ("any rank's", one_of_them),
        ):
            found.setdefault(kind, []).append(int((mean | same).sum()))
    return tuple((kind, tuple(counts)) for kind, counts in found.items())


class Rounded(NamedTuple):
    """A shorter dtype whose roundings are of the size of a rank's errors (empty: none), and whether
    the result shows that it is that dtype: `on_grid` and `of_terms`.
    """

    dtype: str = ""
    on_grid: bool = False
    of_terms: bool = False


def rounded(measured: Measured, unit: float, own: float) -> tuple[Rounded, ...]:
    """Per rank, a dtype that the result shows, or else the least short one of those whose
    roundings are of the size of its errors. The bound for many ranks in one dtype has room for the
    roundings of a single one in the next: the size alone does not tell them apart.
    """
    found = []
    for rank, dtypes in enumerate(_shorter(measured, unit)):
        tried = [
            Rounded(d, on_grid(measured, rank, d, own), of_terms(measured, rank, d))
            for d in reversed(dtypes)
        ]
        shown = [one for one in tried if one.on_grid or one.of_terms]
        found.append((shown or tried[-1:] or [Rounded()])[0])
    return tuple(found)


def _shorter(measured: Measured, unit: float) -> list[list[str]]:
    """Per rank, the shorter dtypes whose roundings are of the size of its errors, the least short
    one first.
    """
    mean, ranks = measured.interval.mean, range(measured.world)
    errors = {rank: (measured.result(rank) - mean).abs() for rank in measured.wrong}
    weights = measured.view.weights
    size = sum(w / len(ranks) * float(measured.shard(r).norm()) for r, w in enumerate(weights))
    found: list[list[str]] = [[] for _ in ranks]
    for dtype in _SHORTER if errors else ():
        coarse = unit_roundoff(getattr(torch, dtype))
        if coarse <= unit:
            continue
        wide = measured.view.interval(measured.index, wire=dtype)
        assert wide is not None
        least = _LEAST_ROUNDING * coarse * size / sqrt(len(ranks))
        for rank, error in errors.items():
            if float(error.norm()) >= least and bool((error <= wide.bound).all()):
                found[rank].append(dtype)
    return found


def on_grid(measured: Measured, rank: int, dtype: str, own: float) -> bool:
    """Whether a rank's result, or W times that, holds numbers of a shorter dtype only, up to a
    rounding of their own. Of a few elements all may be so by chance.
    """
    grid, result = getattr(torch, dtype), measured.result(rank)
    if not bool(result.any()):
        return False
    if own > unit_roundoff(grid) / 16:
        return False
    for scaled in (result, result * measured.world):
        rounded = scaled.to(grid).double()
        if bool(((scaled - rounded).abs() <= 2 * own * scaled.abs()).all()):
            return True
    return False


def of_terms(measured: Measured, rank: int, dtype: str) -> bool:
    """Whether a result is the mean of gradients that were rounded to a dtype before they were added
    up in their own: weighted before or after that.
    """
    short, world = getattr(torch, dtype), measured.world
    own_dtype = getattr(torch, measured.view.specs[measured.index].dtype)
    own_dtype = own_dtype.to_real() if own_dtype.is_complex else own_dtype
    owns = [measured.left(r) for r in range(world)]
    result, bound = measured.result(rank), 2 * measured.interval.bound
    for before in (1.0, float(world), 0.0):
        total = torch.zeros_like(result)
        for share, own in zip(measured.shares, owns, strict=True):
            weight = share * before if before else 1.0 / world
            rounded = (own * weight).to(own_dtype).to(short).double()
            total += rounded * (share / weight)
        if bool(((result - total).abs() <= bound).all()):
            return True
    return False
