"""How far a mean of quantised gradients may be from the mean: `--accept quantised:BITS`.

Rank r sends its gradients as whole numbers of BITS bits: x becomes round(x / s) + z, and what
arrives is s times that, less z. The *quantum* s is the range of what is quantised together,
divided by the number of steps. The range of all that a rank holds, both signs alike, is the widest
that a quantiser needs, and two of 2^BITS numbers may be left unused by a symmetric one, so a right
one has at most

    q_r  =  2 max |g_r| / (2^BITS - 2),     over every parameter of the rank

One that takes a bucket, a tensor or a channel at a time, or the range from least to largest, has
less. An element is then off by at most half of it. The quotient and the zero point are computed in
floating point (float32, or wider where gradients are): the quotient, below 2^BITS, moves by at most
2^BITS u quanta, and s itself by 3 u, so that with u = 2^-24

    |x' - x|  <=  h_r + u |x'|,     h_r  =  q_r / 2 * (1 + 2^(BITS + 2) u)

Clamping to the grid takes nothing away beyond that, as the grid spans the range. What arrives is
averaged as any gradients are (`rounding`), with one more rounding for the product, so that

    |actual - mean|  <=  sum_r w_r h_r  +  gamma(k + 1) sum_r w_r (|g_r| + h_r)  +  (k + 1) tiny

An exact quantum is not asked for: it may be finer, never coarser. What is smaller than half of it
may arrive as zero.
"""

from collections.abc import Sequence

import torch

from distcheck.oracles.rounding import Interval, gamma, unit_roundoff

_U = 2.0**-24


def half_quantum(gradients: Sequence[torch.Tensor | None], bits: int) -> float:
    """h_r: the most by which quantising may move an element of one rank's gradients."""
    largest = max(
        (float(g.abs().max()) for g in gradients if g is not None and g.numel()), default=0.0
    )
    return largest / (2.0**bits - 2.0) * (1.0 + 2.0 ** (bits + 2) * _U)


def widened(
    interval: Interval, halves: Sequence[float], weights: Sequence[float], dtype: torch.dtype
) -> Interval:
    """The interval of quantised gradients, from that of the gradients themselves."""
    moved = sum(abs(weight) * half for weight, half in zip(weights, halves, strict=True))
    unit = max(_U, unit_roundoff(dtype))
    world = len(weights)
    roundings = gamma(world + 6, unit)  # k + 1, where k is the largest that `rounding` counts
    own = gamma(world + 1, unit_roundoff(dtype))  # the least that its bound has of the magnitude
    # The interval's bound holds `own` of the magnitude at least: scaled up to float32's roundings.
    bound = interval.bound * max(1.0, roundings / own)
    return Interval(interval.mean, bound + moved * (1 + roundings))
