"""R: the mean of the shard gradients, and how far any order of summation may be from it.

Let u be the unit roundoff, gamma(k) = k u / (1 - k u), and g_r the W shard gradients with
weights w_r that add up to 1. A result computed in the dtype, in any order, is

    sum_r  w_r g_r (1 + d_r),   |d_r| <= gamma(k)

where k counts the roundings that a term goes through: at most W - 1 additions, and two for the
scale (1 / W rounded, then multiplied), so k = W + 1; with unequal shards two more for the weight
(rounded, then multiplied), so k = W + 3. Hence

    |actual - sum_r w_r g_r|  <=  gamma(k) * sum_r w_r |g_r|  +  k * tiny

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1 and section 4.2);
`tiny`, the smallest subnormal number, covers products that underflow. The mean itself is
computed in float64, and its own error is added by the same formula with float64's u.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Unit roundoff and smallest subnormal number.
_UNITS = {
    torch.float64: (2.0**-53, 2.0**-1074),
    torch.float32: (2.0**-24, 2.0**-149),
    torch.float16: (2.0**-11, 2.0**-24),
    torch.bfloat16: (2.0**-8, 2.0**-133),
}


@dataclass(frozen=True)
class Interval:
    """Elementwise: the mean, and the most by which a correct result may differ; float64."""

    mean: torch.Tensor
    bound: torch.Tensor


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1.0 to the next number."""
    return _UNITS[dtype][0]


def gamma(roundings: int, unit: float) -> float:
    """The relative error that `roundings` roundings can add up to."""
    return roundings * unit / (1 - roundings * unit)


def interval(
    shards: Sequence[torch.Tensor], weights: Sequence[float], *, rescaled: bool = False
) -> Interval:
    """The interval for one parameter.

    `shards` are the ranks' gradients, all of one shape and dtype. `weights` say what each counts
    for; they add up to 1, unless the shards are `rescaled`: a strategy scaled its loss by some
    factor, the weights take that back, and so will the strategy, with two roundings more.
    """
    world = len(shards)
    equal = all(weight == weights[0] for weight in weights)
    roundings = world + 1 if equal and not rescaled else world + 3
    roundings += 2 if rescaled else 0
    unit, tiny = _UNITS[shards[0].dtype]
    mean = torch.zeros(shards[0].shape, dtype=torch.float64)
    magnitude = torch.zeros_like(mean)
    for shard, weight in zip(shards, weights, strict=True):
        mean.add_(shard, alpha=weight)
        magnitude.add_(shard.abs(), alpha=weight)
    factor = gamma(roundings, unit) + gamma(world + 1, _UNITS[torch.float64][0])
    return Interval(mean, magnitude.mul_(factor).add_(roundings * tiny))
