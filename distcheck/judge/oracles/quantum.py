"""Bound of the mean of quantized gradients: `--accept quantized:BITS`.

Rank r sends its gradients as whole numbers of BITS bits: x becomes round(x / s) + z, and the
received value is s times that, less z. The *quantum* s is the range of all elements quantized
together, divided by the number of steps. The range of all that a rank holds, symmetric in sign, is
the widest that a quantizer with a grid for each rank needs, and two of 2^BITS numbers may be left
unused by a symmetric one, so a right one has at most

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

Either of the last two is at least the first (and all are equal if ranks are), and none is asked
for, so that H is the larger of the two. The received values are averaged like any gradients
(`rounding`), with one more rounding for the product, so that

    |actual - mean|  <=  H  +  gamma(k + 1) (sum_r w_r |g_r| + H)  +  (k + 1) tiny

An exact quantum is not asked for: it may be finer, never coarser. Elements below half of it may
become zero. Where one of a rank's gradients is infinite or NaN its range has no end, and nothing is
known of the others.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, gamma, unit_roundoff

_U = unit_roundoff("float32")  # Derived: quotients are computed in at least float32, see above


def half_quantum(gradients: Sequence[torch.Tensor | None], bits: int) -> float:
    """Return h_r, the largest quantization error of an element of one rank's gradients. Raises
    NotBoundedError if one is not finite.
    """
    largest = [float(g.abs().max()) for g in gradients if g is not None and g.numel()]
    if not all(map(isfinite, largest)):
        raise NotBoundedError(
            "one of its gradients is not finite, so the quantization error of the others has no "
            "bound"
        )
    return max(largest, default=0.0) / (2.0**bits - 2.0) * (1.0 + 2.0 ** (bits + 2) * _U)


def quantized_interval(
    interval: Interval, halves: Sequence[float], weights: Sequence[float], dtype: torch.dtype
) -> Interval:
    """Widen an interval of gradients to quantized ones. If the mean is infinite, the bound is 0, as
    before.
    """
    sizes, world = [abs(weight) for weight in weights], len(weights)
    moved = max(
        max(halves) * sum(sizes),
        world * max(size * half for size, half in zip(sizes, halves, strict=True)),
    )
    unit = max(_U, unit_roundoff(dtype))
    roundings = gamma(world + 6, unit)  # k + 1, where k is the largest that `rounding` counts
    own = gamma(world + 1, unit_roundoff(dtype))  # the least factor of the magnitude in its bound
    # The bound contains at least `own` times the magnitude: scaled to float32's roundings.
    bound = interval.bound * max(1.0, roundings / own)
    bound = bound + moved * (1 + roundings)
    return Interval(interval.mean, torch.where(interval.mean.isfinite(), bound, 0.0))
