"""Which of the simplest mistakes a comparison of gradients would have shown.

A comparison that passes says something only if it would have failed for a wrong gradient. So what
each of these mistakes leaves is compared as well, with the bound in force:

    no-sync           rank r keeps its own gradient                         r = each rank
    lost-rank         rank r's part is missing from the sum, which is divided by all ranks, or by
                      the others alone                                      r = each rank
    doubled-rank      rank r's part is added twice                          r = each rank
    times-world       the sum is not divided
    divided-by-world  the mean is divided once more
    stale             the mean of the step before
    other-parameter   the mean of another parameter of the same shape       each of them

Let h_r = s_r g_r be the parts that add up to the mean m. A mistake leaves m + d, computed by the
strategy with roundings of its own: those of parts that add up to at most c times as much, so they
are within c times the bound b of the right result (`oracles/rounding.py`: the bound grows with the
sum of the parts' absolute values). The comparison fails for certain where

    |d|  >  (1 + c) b

so a mistake counts as shown if that holds for one element (for S32 and S64: for the L2 norms).
c is 1 for a part that is missing, W for a sum that is not divided, 1 / (1 - w_r) where the others
alone divide, and 1 + max(|h_r| / sum |h|, w_r) for a part that is added twice (the second for a
grid, `oracles/quantum.py`, whose error grows with the weights). What was recorded (a rank's own
gradient, an earlier step, another parameter) is compared as it is: c = 0.

Where bits are compared (X), the right result y is known to the bit, not only to within b of m. So
the comparison fails for certain where |m + d - y| > c b.

At most 4,096 elements of a tensor are tried first. The L2 norm over some elements is a lower bound
of the whole norm, so what these show holds; the whole tensor is tried where they show too little.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from distcheck.machine.numerics import every
from distcheck.records import number
from distcheck.records.mistakes import MISTAKES, Shown

_SAMPLE = 1 << 12
_MOST_TWINS = 16
# Derived: 32 u of float64. Where c = 0, what a mistake leaves is rounded once or twice here; where
# c > 0, c b is more than the roundings of the sum.
_IN_DOUBLE = 2.0**-48


@dataclass(frozen=True)
class Parts:
    """What a mean is made of: `gradients` [W, n] and `shares` [W], which give the mean as
    `shares @ gradients`; `own` [W] is what a rank's gradient is multiplied by where it is kept;
    `weights` [W] what each rank counts for, with sum 1. `bound` is elementwise [n], or a number
    for the L2 norm. All in float64. `expected` [n] are the bits that are compared,
    where bits are; `bound` is then only how far a mistaken sum may be from its exact value.
    """

    gradients: torch.Tensor
    shares: torch.Tensor
    own: torch.Tensor
    weights: torch.Tensor
    bound: torch.Tensor | float
    expected: torch.Tensor | None = None


def shown_by(
    parts_at: Callable[[int], Parts],
    *,
    elements: int,
    ranks: Sequence[int],
    before: torch.Tensor | None = None,
    others: Sequence[torch.Tensor] = (),
) -> Shown:
    """What a comparison of one tensor at one step would have shown.

    `parts_at(k)` gives every k-th element. `before` is the tensor that the step before left, and
    `others` are those of other parameters of this shape at this step, as recorded. `ranks` are the
    numbers of the ranks in the report.
    """
    stride = max(1, -(-elements // _SAMPLE))
    found = _try(parts_at(stride), stride, ranks, before, others)
    if stride > 1 and not is_complete(found, ranks):
        return _try(parts_at(1), 1, ranks, before, others)
    return found


def is_complete(found: Shown, ranks: Sequence[int]) -> bool:
    """Whether every mistake that could be made shows, of every rank."""
    return all(len(found.shown[m]) >= _most(m, ranks) for m in found.shown)


def _most(mistake: str, ranks: Sequence[int]) -> int:
    return len(ranks) if MISTAKES[mistake].of_ranks else 1


def _try(
    parts: Parts,
    stride: int,
    ranks: Sequence[int],
    before: torch.Tensor | None,
    others: Sequence[torch.Tensor],
) -> Shown:
    world, shares = len(ranks), parts.shares.unsqueeze(1)
    scaled = parts.gradients * shares
    mean = scaled.sum(0)

    def shows(left: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
        """Per row of `left` [k, n]: whether a comparison fails for it; `c` [k, 1] or a number."""
        if parts.expected is None:
            apart, allowed = (left - mean).abs(), (1.0 + c) * parts.bound
        else:
            apart = (left - parts.expected).abs()
            allowed = c * parts.bound + _IN_DOUBLE * parts.expected.abs()
        if isinstance(parts.bound, torch.Tensor):
            return (apart > allowed).any(1)
        norms: torch.Tensor = apart.norm(dim=1, keepdim=True) > allowed
        return norms.squeeze(1)

    rest = (1.0 - parts.weights).unsqueeze(1)
    of_rank: Mapping[str, torch.Tensor] = {
        "no-sync": shows(parts.gradients * parts.own.unsqueeze(1), 0.0),
        "lost-rank": shows(mean - scaled, 1.0) & shows((mean - scaled) / rest, 1.0 / rest),
        "doubled-rank": shows(mean + scaled, 1.0 + _added(scaled, parts)),
    }
    of_all = {
        "times-world": shows(world * mean.unsqueeze(0), float(world)),
        "divided-by-world": shows(mean.unsqueeze(0) / world, 1.0),
    }
    if before is not None:
        of_all["stale"] = shows(every(stride, before).double().unsqueeze(0), 0.0)
    if others:
        rows = torch.stack([every(stride, other).double() for other in others[:_MOST_TWINS]])
        of_all["other-parameter"] = shows(rows, 0.0).all().reshape(1)
    shown = {
        name: tuple(rank for rank, seen in zip(ranks, rows.tolist(), strict=True) if seen)
        for name, rows in of_rank.items()
    }
    shown |= {name: (0,) if bool(row[0]) else () for name, row in of_all.items()}
    return Shown(
        shown=shown,
        scale=number(_least_scale(mean, parts.bound)),
        zero=not bool(parts.gradients.any()),
        alike=bool((parts.gradients == parts.gradients[0]).all()),
        steps=1 if any(shown[name] for name in shown if MISTAKES[name].of_exchange) else 0,
    )


def _added(scaled: torch.Tensor, parts: Parts) -> torch.Tensor:
    """How much one rank's part adds to the roundings, as a share: [W, n], or [W, 1] for norms."""
    sizes = scaled.abs()
    if not isinstance(parts.bound, torch.Tensor):
        sizes = sizes.norm(dim=1, keepdim=True)
        share = sizes / scaled.abs().sum(0).norm()
    else:
        share = sizes / sizes.sum(0)
    return torch.maximum(share.nan_to_num(nan=1.0), parts.weights.unsqueeze(1))


def _least_scale(mean: torch.Tensor, bound: torch.Tensor | float) -> float:
    """The smallest relative error of a factor that the comparison fails for: 2 b / |m|."""
    if not isinstance(bound, torch.Tensor):
        size = float(torch.where(mean.isfinite(), mean, 0.0).norm())
        return 2.0 * bound / size if size else float("inf")
    ratios = 2.0 * bound / mean.abs()
    ratios = ratios[ratios.isfinite() & mean.isfinite()]
    return float(ratios.min()) if ratios.numel() else float("inf")
