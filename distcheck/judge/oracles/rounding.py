"""The rounding bound: the mean of the shard gradients, and the rounding bound of any summation
order.

Let u be the unit roundoff, gamma(k) = k u / (1 - k u), and g_r the W shard gradients with weights
w_r that add up to 1. A result computed in the dtype, in any order, is

    sum_r  w_r g_r (1 + d_r),   |d_r| <= gamma(k)

where k counts the roundings that a term goes through: at most W - 1 additions, and two for the
scale (1 / W rounded, then multiplied), so k = W + 1; with unequal shards two more for the weight
(rounded, then multiplied), so k = W + 3. Hence

    |actual - sum_r w_r g_r|  <=  gamma(k) * sum_r |w_r| |g_r|  +  k * tiny

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 4.2);
`tiny`, the smallest subnormal number, covers products that underflow. A weight is negative if the
loss was multiplied by a negative factor, which the weight cancels.

If backward starts from the sum over a rank's n_r tokens, g_r is that sum's gradient and w_r is 1 /
T, for the T tokens of all ranks: integers, which are added up exactly. Dividing the sum by T, or
multiplying by 1 / T or by W / T and dividing by W, is covered by the same k, with two more as for
any loss that was scaled (`rescaled`): W + 3, or W + 5.

The mean itself is computed in float64, and its own error is added by the same formula with
float64's u. A term of it goes through W roundings (its product and W - 1 additions: the first is to
zero) and those of its weight: two, for n_r W / N and its division by W, and five more if the loss
was scaled: for the factor (declared times observed), the division by it, and, if another loss is
tested, the factor of that loss, a product and a quotient. So k is W + 2, or W + 7. The bound and
the compared values are computed in float64, too: fewer than 8000 roundings, 2^-40 of it.

A strategy may promise that gradients are sent in another dtype, its `wire`. Every term is then
rounded once more before it is sent, and each of the k roundings is counted with the larger of the
two units (and of the two tiny numbers). Converting the result to the gradient's dtype is exact if
that dtype represents every number of the wire's (float32 and float64 represent all of float16 and
bfloat16, float64 all of float32); otherwise it is one more rounding. With U the larger unit, the
bound is gamma(k + 1 or k + 2) with U: for 4 equal shards and bfloat16 2.4 % of sum_r w_r |g_r|, for
float16 0.3 %. Such a wire may cause an error of that size in an element; the rounding bound does
not detect a smaller error in every element, but the bitwise layer does, if an order is promised.

A loop may run backward A times in a step, over parts of the shard with gradients h_ra. Code that
reduces in each of these passes is right: the averaged part is the same on every rank, so a later
reduction leaves it unchanged, except for rounding. A term then goes through k roundings in each
reduction, and one whenever a part is added to the previous sum, A k + A - 1 in total. The bound is
relative to the parts, which may cancel in g_r = h_r1 + ... + h_rA. The g_r from which the mean is
computed were summed in the dtype, with A - 1 additional roundings. Hence

    |actual - sum_r w_r g_r|  <=  gamma(A k + 2 (A - 1)) * sum_r |w_r| sum_a |h_ra|  +  ...

Underflow below the wire's smallest number is an absolute error of `tiny` before the weights are
applied, so `tiny` is multiplied by the largest of them (relative to 1 / W) where that is above 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.machine.numerics import gamma, holds_all_of, real_parts, smallest, unit_roundoff

# Derived: the bound is a sum of W nonnegative terms and a few products; 2^-40 is 2^13 u of float64,
# which covers the roundings of 8,000 ranks.
_ROOM = 1 + 2.0**-40


@dataclass(frozen=True)
class Interval:
    """For each element, the mean and the largest error of a correct result; float64."""

    mean: torch.Tensor
    bound: torch.Tensor


def reference_roundings(world: int, *, rescaled: bool) -> int:
    """Return the number of roundings of a term of the float64 mean."""
    return world + (7 if rescaled else 2)


def interval(
    shards: Sequence[torch.Tensor],
    weights: Sequence[float],
    *,
    rescaled: bool = False,
    wire: torch.dtype | None = None,
    passes: int = 1,
    magnitudes: Sequence[torch.Tensor] | None = None,
) -> Interval:
    """Return the interval for one parameter.

    shards      the ranks' gradients, of one shape and dtype
    weights     the rank weights, with sum 1 unless the shards are `rescaled`: then a strategy
                scaled its loss, and the weights undo that, as the strategy does with two more
                roundings
    wire        dtype that gradients are rounded to and added in, if not theirs
    passes      number of backward passes that may each synchronize
    magnitudes  for each rank, the summed absolute values of the passes' gradients (`real_parts` of
                complex ones); for one pass, the shard's absolute value

    Complex gradients become pairs of real ones: mean and bound then have a last dimension of 2. If
    the mean is infinite, there is no rounding: the bound is 0. Raises NotBoundedError if roundings
    may be as large as the result.
    """
    shards = [real_parts(shard) for shard in shards]
    world = len(shards)
    equal = all(weight == weights[0] for weight in weights)
    roundings = world + 1 if equal and not rescaled else world + 3
    roundings += 2 if rescaled else 0
    own = shards[0].dtype
    unit, tiny = unit_roundoff(own), smallest(own)
    if wire is not None:
        roundings += 1 if holds_all_of(own, wire) else 2
        unit, tiny = max(unit, unit_roundoff(wire)), max(tiny, smallest(wire))
        tiny *= max(1.0, world * max(map(abs, weights)))
    roundings = passes * roundings + 2 * (passes - 1)
    mean = torch.zeros_like(shards[0], dtype=torch.float64)
    magnitude = torch.zeros_like(mean)
    for shard, size, weight in zip(shards, magnitudes or shards, weights, strict=True):
        mean.add_(shard, alpha=weight)
        magnitude.add_(size.abs(), alpha=abs(weight))
    own_error = gamma(reference_roundings(world, rescaled=rescaled), unit_roundoff("float64"))
    factor = (gamma(roundings, unit) + own_error) * _ROOM
    bound = magnitude.mul_(factor).add_(roundings * tiny)
    return Interval(mean, torch.where(mean.isfinite(), bound, 0.0))
