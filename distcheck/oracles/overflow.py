"""Where a right sum may leave the dtype's range although the mean is within it.

A sum that is divided at its end goes through partial sums of terms that are not divided. Let M be
the largest number of the dtype, and T_r what rank r adds: its gradient, multiplied by its weight
W w_r or not, so |T_r| <= c_r |g_r| with c_r = max(1, W w_r). Whatever the order, a partial sum is
at most

    (1 + gamma(k)) P,     P = sum of c_r g_r over the ranks with g_r > 0

and at least (1 + gamma(k)) N, with N the same over the ranks with g_r < 0: adding up fewer terms,
or terms of the other sign, only brings it nearer to zero (gamma and k as in `rounding.py`). So

    +infinity is right only where (1 + gamma(k)) P > M,
    -infinity is right only where (1 + gamma(k)) N < -M,
    NaN is right only where both hold: it takes an infinity of either sign.

What divides before it adds has terms of 1 / W of the size: 3e38 on each of four ranks gives an
infinity in the one case and 3e38 in the other. Both are right in float32, which promises neither.
So R, S32 and S64 accept a result that is not finite at an element where these conditions hold, and
hold the others to their bound. A strategy that promises to divide first is not given that room, and
X expects the bits of the promised order: an infinity where that overflows, a number where not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.oracles.rounding import real_parts


@dataclass(frozen=True)
class Overflow:
    """Elementwise (`real_parts` of complex numbers): whether +infinity and -infinity are right."""

    upwards: torch.Tensor
    downwards: torch.Tensor

    @property
    def anywhere(self) -> torch.Tensor:
        """The elements where a result need not be finite."""
        return self.upwards | self.downwards

    def allows(self, actual: torch.Tensor) -> torch.Tensor:
        """The elements of a result that are not finite, and right so."""
        parts = real_parts(actual)
        return (
            (parts.isposinf() & self.upwards)
            | (parts.isneginf() & self.downwards)
            | (parts.isnan() & self.upwards & self.downwards)
        )


def overflow(
    shards: Sequence[torch.Tensor],
    shares: Sequence[float],
    *,
    divides_first: bool,
    relative: float,
    dtype: torch.dtype,
) -> Overflow | None:
    """Where the sum of the ranks' gradients may overflow `dtype`, in which it is added up; None
    where it cannot. `shares` add up to 1 (but for the factor of a scaled loss), `relative` is
    gamma(k).
    """
    most, world = torch.finfo(dtype).max, len(shards)
    parts = [real_parts(shard) for shard in shards]
    least_factor = 1.0 / world if divides_first else 1.0
    own = 1.0 if divides_first else float(world)
    factors = [max(least_factor, own * abs(share)) * (1.0 + relative) for share in shares]
    largest = sum(f * _largest(p) for f, p in zip(factors, parts, strict=True))
    if largest <= most:
        return None
    upwards = torch.zeros_like(parts[0], dtype=torch.float64)
    downwards = torch.zeros_like(upwards)
    for factor, part in zip(factors, parts, strict=True):
        upwards.add_(part.clamp(min=0.0), alpha=factor)
        downwards.add_(part.clamp(max=0.0), alpha=factor)
    return Overflow(upwards > most, downwards < -most)


def _largest(part: torch.Tensor) -> float:
    """The largest absolute value; not a number where one of them is none."""
    if part.numel() == 0:
        return 0.0
    least, most = part.aminmax()
    return max(-float(least), float(most)) if bool(least <= most) else float("nan")
