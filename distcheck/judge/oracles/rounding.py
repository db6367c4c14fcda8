"""The rounding bound: the mean of the shard gradients, and how far any order of summation may be
from it.

Let u be the unit roundoff, gamma(k) = k u / (1 - k u), and g_r the W shard gradients with
weights w_r that add up to 1. A result computed in the dtype, in any order, is

    sum_r  w_r g_r (1 + d_r),   |d_r| <= gamma(k)

where k counts the roundings that a term goes through: at most W - 1 additions, and two for the
scale (1 / W rounded, then multiplied), so k = W + 1; with unequal shards two more for the weight
(rounded, then multiplied), so k = W + 3. Hence

    |actual - sum_r w_r g_r|  <=  gamma(k) * sum_r |w_r| |g_r|  +  k * tiny

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 4.2);
`tiny`, the smallest subnormal number, covers products that underflow. A weight is negative where a
loss was multiplied by a negative factor, which the weight takes back.

Where backward starts from the sum over a rank's n_r tokens, g_r is that sum's gradient and w_r is
1 / T, for the T tokens of all ranks: integers, which are added up exactly. Dividing the sum by
T, or multiplying by 1 / T or by W / T and dividing by W, is covered by the same k, with two more as
for any loss that was scaled (`rescaled`): W + 3, or W + 5.

The mean itself is computed in float64, and its own error is added by the same formula with
float64's u. A term of it goes through W roundings (its product and W - 1 additions: the first is
to zero) and those of its weight: two, for n_r W / N and its division by W, and five more where the
loss was scaled: for the factor (declared times observed), the division by it, and, where another
loss is asked after, that one's factor, a product and a quotient. So k is W + 2, or W + 7. The bound
and what is compared with it are computed in float64, too: fewer than 8000 roundings, 2^-40 of it.

A strategy may promise that gradients travel in another dtype, its `wire`. Then every term is
rounded once more, on its way in, and each of the k roundings is counted with the larger of the
two units (and of the two tiny numbers). The result goes back into the gradient's dtype without
rounding where that holds every number of the wire's (float32 and float64 hold all of float16's
and bfloat16's, float64 those of float32); otherwise that is one rounding more. With U the
larger unit, the bound is gamma(k + 1 or k + 2) with U: for 4 equal shards and bfloat16 2.4 % of
sum_r w_r |g_r|, for float16 0.3 %. An error of that size is what such a wire may do to an
element; a smaller one in every element is not noticed by the rounding bound, but by the bitwise
layer, where an order is promised.

A loop may run backward A times in a step, over stretches of the shard with gradients h_ra, and code
that exchanges in each of them is right: what it has averaged is the same on every rank, so a later
exchange leaves it as it is, but for rounding. A term then goes through k roundings in each exchange
and one wherever a stretch is added to what was there before, A k + A - 1 in all, and what it is
measured against are the stretches, which may cancel in g_r = h_r1 + ... + h_rA. The g_r from which
the mean is taken were added up in the dtype, with A - 1 roundings of their own. Hence

    |actual - sum_r w_r g_r|  <=  gamma(A k + 2 (A - 1)) * sum_r |w_r| sum_a |h_ra|  +  ...

What falls below the wire's smallest number is an absolute error of `tiny` before the weights are
applied, so `tiny` is multiplied by the largest of them (relative to 1 / W) where that is above 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.machine.numerics import gamma, holds_all_of, real_parts, smallest, unit_roundoff

# Derived: the bound is a sum of W terms, none negative, and a few products; 2^-40 is 2^13 u of
# float64, so it has room for the roundings of 8,000 ranks.
_ROOM = 1 + 2.0**-40


@dataclass(frozen=True)
class Interval:
    """Elementwise: the mean, and the most by which a correct result may differ; float64."""

    mean: torch.Tensor
    bound: torch.Tensor


def reference_roundings(world: int, *, rescaled: bool) -> int:
    """How many roundings a term of the float64 mean goes through, by which it may be off itself."""
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
    """The interval for one parameter.

    `shards` are the ranks' gradients, all of one shape and dtype. `weights` say what each counts
    for; they add up to 1, unless the shards are `rescaled`: a strategy scaled its loss by some
    factor, the weights take that back, and so will the strategy, with two roundings more. `wire`
    is the dtype that they are rounded to and added up in, if not their own. Complex gradients are
    taken as pairs of real ones: mean and bound then have a last dimension of 2.

    `passes` is the number of backward passes that may each exchange, and `magnitudes` has, per
    rank, what the absolute values of their gradients add up to (`real_parts` of complex ones); it
    is the shard's own absolute value where there is one pass.

    Where the mean is infinite there is no rounding left: the bound is 0. Raises NotBoundedError
    where roundings may add up to what is rounded.
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
