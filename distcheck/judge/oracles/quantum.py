"""How far a mean of quantized gradients may be from the mean: `--accept quantized:BITS`.

Rank r sends its gradients as whole numbers of BITS bits: x becomes round(x / s) + z, and what
arrives is s times that, less z. The *quantum* s is the range of what is quantized together,
divided by the number of steps. The range of all that a rank holds, both signs alike, is the widest
that a quantizer with a grid for each rank needs, and two of 2^BITS numbers may be left unused by a
symmetric one, so a right one has at most

    q_r  =  2 max |g_r| / (2^BITS - 2),     over every parameter of the rank

One that takes a bucket, a tensor or a channel at a time, or the range from least to largest, has
less. An element is then off by at most half of it. The quotient and the zero point are computed in
floating point (float32, or wider where gradients are): the quotient, below 2^BITS, moves by at most
2^BITS u quanta, and s itself by 3 u, so that with u = 2^-24

    |x' - x|  <=  h_r + u |x'|,     h_r  =  q_r / 2 * (1 + 2^(BITS + 2) u)

Clamping to the grid takes nothing away beyond that, as the grid spans the range. In the mean these
add up to H:

    sum_r w_r h_r            where each rank has a grid of its own; whether weights go on before or
                             after makes no difference, as they stretch the grid as well
    max_r h_r  sum_r w_r     where all have one, and the whole numbers are added up themselves: it
                             must span the widest of their ranges (max_r q_r)
    W max_r w_r h_r          the same, where weights went on before: then those of w_r g_r

Either of the last two is at least the first (and all are alike where ranks are), and none is asked
for, so that H is the larger of the two. What arrives is averaged as any gradients are (`rounding`),
with one more rounding for the product, so that

    |actual - mean|  <=  H  +  gamma(k + 1) (sum_r w_r |g_r| + H)  +  (k + 1) tiny

An exact quantum is not asked for: it may be finer, never coarser. What is smaller than half of it
may arrive as zero. Where one of a rank's gradients is infinite or NaN its range has no end, and
nothing is known of the others.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, gamma, unit_roundoff

_U = unit_roundoff("float32")  # Derived: quotients are computed in float32 at least, see above


def half_quantum(gradients: Sequence[torch.Tensor | None], bits: int) -> float:
    """h_r: the most by which quantizing may move an element of one rank's gradients. Raises
    NotBoundedError where one of them is not finite.
    """
    largest = [float(g.abs().max()) for g in gradients if g is not None and g.numel()]
    if not all(map(isfinite, largest)):
        raise NotBoundedError(
            "one of its gradients is not finite, and nothing bounds how far quantizing moves others"
        )
    return max(largest, default=0.0) / (2.0**bits - 2.0) * (1.0 + 2.0 ** (bits + 2) * _U)


def widened(
    interval: Interval, halves: Sequence[float], weights: Sequence[float], dtype: torch.dtype
) -> Interval:
    """The interval of quantized gradients, from that of the gradients themselves. Where the mean is
    infinite the bound is 0, as there.
    """
    sizes, world = [abs(weight) for weight in weights], len(weights)
    moved = max(
        max(halves) * sum(sizes),
        world * max(size * half for size, half in zip(sizes, halves, strict=True)),
    )
    unit = max(_U, unit_roundoff(dtype))
    roundings = gamma(world + 6, unit)  # k + 1, where k is the largest that `rounding` counts
    own = gamma(world + 1, unit_roundoff(dtype))  # the least that its bound has of the magnitude
    # The interval's bound holds `own` of the magnitude at least: scaled up to float32's roundings.
    bound = interval.bound * max(1.0, roundings / own)
    bound = bound + moved * (1 + roundings)
    return Interval(interval.mean, torch.where(interval.mean.isfinite(), bound, 0.0))
