"""Bound of the mean of quantized gradients: `--accept quantized:BITS`.

Rank r sends its gradients as integers of BITS bits: x becomes round(x / s) + z, and the received
value is s times (this integer minus z). The *quantum* s is the range of all elements quantized
together, divided by the number of steps. The widest range that a quantizer with one grid per rank
needs is that of all of the rank's elements, symmetric in sign. A symmetric quantizer may leave two
of the 2^BITS integers unused. The quantum of a correct quantizer is therefore at most

    q_r  =  2 max |g_r| / (2^BITS - 2),     over every parameter of the rank

The quantum is smaller if there is one grid per bucket, tensor or channel, or if the grid spans only
the range from the smallest to the largest element. The error of an element is at most half a
quantum. The quotient and the zero point are computed in floating point (float32, or wider if the
gradients are). This changes the quotient, below 2^BITS, by at most 2^BITS u quanta, and s by at
most 3 u, relatively. So with u = 2^-24

    |x' - x|  <=  h_r + u |x'|,     h_r  =  q_r / 2 * (1 + 2^(BITS + 2) u)

Clamping to the grid adds no error, since the grid spans the range. In the mean, these errors add up
to H:

    sum_r w_r h_r            if each rank has its own grid. Weights may be applied before or after
                             quantization, since they scale the grid as well
    max_r h_r  sum_r w_r     if all ranks share one grid, and the integers themselves are summed:
                             the grid must span the widest of the ranks' ranges (max_r q_r)
    W max_r w_r h_r          the same, if weights are applied before: the grid spans w_r g_r

Each of the last two is at least the first (and all are equal if the ranks' ranges are). None of the
three is required, so H is the larger of the last two. The received values are averaged like any
gradients (`rounding`), with one more rounding for the product. Hence

    |actual - mean|  <=  H  +  gamma(k + 1) (sum_r w_r |g_r| + H)  +  (k + 1) tiny

The quantum may be finer than q_r, but not coarser. Elements below half a quantum may become zero.
If one of a rank's gradients is infinite or NaN, the range is unbounded, and nothing is known about
the others.
"""

from collections.abc import Sequence
from math import isfinite

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, gamma, unit_roundoff

_U = unit_roundoff("float32")  # Derived: quotients are computed in at least float32, see above


def half_quantum(gradients: Sequence[torch.Tensor | None], bits: int) -> float:
    """Return h_r, the largest quantization error of an element of one rank's gradients. Raises
    NotBoundedError if a gradient is not finite.
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
    """Widen the interval of a gradient by quantization; around infinity, the bound is 0."""
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
