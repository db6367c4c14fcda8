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

Settings narrow or widen q_r:

block=N     one grid for every N consecutive elements of a flattened tensor (Dettmers et al.,
            arXiv:2110.02861): the maximum is that of the element's block
scale=norm  the grid spans the L2 norm instead of the maximum (QSGD, Alistarh et al.,
            arXiv:1610.02132)
stochastic  x is rounded to one of its two neighbors, with probabilities that make the error's
            expectation zero. Its error is up to a whole quantum, so h_r is twice as large

The error of a stochastically rounded element is a random number e_i in an interval of length Q_i =
sum_r w_r h_r, of expectation zero up to the bound of `rounding`, R_i; errors of the elements of a
tensor are independent. For every vector v that depends only on the gradients, Hoeffding's
inequality (1963, theorem 2) bounds

    |sum_i v_i e_i|  <=  sqrt(ln(2 / p) / 2  sum_i v_i^2 Q_i^2)  +  sum_i |v_i| R_i

except with probability p. The vectors are the errors that biased roundings would have: down (v_i =
1), toward zero (the sign of the mean), and to the nearest number of grids with one step for a
tensor or block. For those a correct sum is near zero, and a biased one is sum_i v_i^2, with v_i =
Q_i / 2 for rounding down, and v_i^2 = Q_i^2 / (12 W) on average to the nearest. So a tensor of one
grid reveals these biases if it has more than 2 ln(2 / p), or 6 W ln(2 / p), nonzero elements: with
ln(2 / p) = 28 about 60, or 170 W. p is 1e-9 for a whole run, divided by its number of sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import NotBoundedError, gamma, real_parts, unit_roundoff

FALSE_ALARM = 1e-9  # Derived: see above; the probability that a correct run fails
_U = unit_roundoff("float32")  # Derived: quotients are computed in at least float32, see above


def half_quanta(
    gradients: Sequence[torch.Tensor | None],
    bits: int,
    *,
    block: int = 0,
    norm: bool = False,
    stochastic: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return h_r for one rank's gradients, the largest quantization error of their elements: for
    each, one number, or with blocks one for each element. Raises NotBoundedError if a gradient is
    not finite.
    """
    ranges = [
        torch.zeros(())
        if g is None or not g.numel()
        else grid_range(real_parts(g), block=block, norm=norm)
        for g in gradients
    ]
    if not all(bool(one.isfinite().all()) for one in ranges):
        raise NotBoundedError(
            "one of its gradients is not finite, so the quantization error of the others has no "
            "bound"
        )
    if not block and ranges:
        every = torch.stack([one.double() for one in ranges])
        ranges = [every.norm() if norm else every.max()] * len(ranges)
    step = (1.0 + stochastic) / (2.0**bits - 2.0) * (1.0 + 2.0 ** (bits + 2) * _U)
    return tuple(one.double() * step for one in ranges)


def grid_range(gradient: torch.Tensor, *, block: int = 0, norm: bool = False) -> torch.Tensor:
    """Return the largest magnitude (or the norm) of a tensor; with blocks, for each element that of
    its block.
    """
    if not block:
        return gradient.norm() if norm else gradient.abs().max()
    flat = gradient.reshape(-1)
    rows = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    of_rows = rows.norm(dim=1) if norm else rows.abs().amax(1)
    return of_rows.repeat_interleave(block)[: len(flat)].reshape(gradient.shape)


def quantized_interval(
    interval: Interval, halves: Sequence[torch.Tensor], weights: Sequence[float], dtype: torch.dtype
) -> Interval:
    """Widen the interval of a gradient by quantization; around infinity, the bound is 0."""
    sizes, world = torch.tensor([abs(weight) for weight in weights]).double(), len(weights)
    each = torch.stack([half.double() for half in halves], dim=-1)
    moved = torch.maximum(each.amax(-1) * sizes.sum(), world * (each * sizes).amax(-1))
    unit = max(_U, unit_roundoff(dtype))
    roundings = gamma(world + 6, unit)  # k + 1, where k is the largest that `rounding` counts
    own = gamma(world + 1, unit_roundoff(dtype))  # the least factor of the magnitude in its bound
    # The bound contains at least `own` times the magnitude: scaled to float32's roundings.
    bound = interval.bound * max(1.0, roundings / own)
    bound = bound + moved * (1 + roundings)
    return Interval(interval.mean, torch.where(interval.mean.isfinite(), bound, 0.0))


@dataclass(frozen=True)
class Unbiased:
    """The errors of stochastic rounding. `suspects` are the vectors v [k, n], `width` is Q [n],
    `rounding` is R [n], and `probability` is p of one sum.
    """

    mean: torch.Tensor
    suspects: torch.Tensor
    width: torch.Tensor
    rounding: torch.Tensor
    probability: float

    def worst_sum(self, result: torch.Tensor) -> tuple[float, float]:
        """Return the sum of errors that is largest relative to its bound, and this bound."""
        error = (result.to(self.mean.device).double() - self.mean).reshape(-1)
        spread = (self.suspects**2 @ self.width**2) * (log(2 / self.probability) / 2)
        bounds = spread.sqrt() + self.suspects.abs() @ self.rounding
        sums = (self.suspects @ error).abs()
        # Derived: smaller than every bound that is not 0, so that 0 / 0 is 0.
        worst = int((sums / bounds.clamp(min=1e-300)).argmax())
        return float(sums[worst]), float(bounds[worst])


def biased_roundings(
    gradients: Sequence[torch.Tensor], weights: Sequence[float], bits: int, block: int = 0
) -> torch.Tensor:
    """Return the errors [k, n] of the mean if roundings were biased, given the ranks' gradients."""
    mean = sum(w * g.double() for g, w in zip(gradients, weights, strict=True))
    assert isinstance(mean, torch.Tensor)
    found = [torch.ones_like(mean), mean.sign()]
    for norm in (False, True):
        for steps in (2.0 ** (bits - 1) - 1, 2.0 ** (bits - 1), 2.0**bits - 1):
            error = torch.zeros_like(mean)
            for gradient, weight in zip(gradients, weights, strict=True):
                quantum = grid_range(gradient.double(), block=block, norm=norm) / steps
                nearest = (gradient.double() / quantum).nan_to_num().round() * quantum
                error += weight * (nearest - gradient.double())
            found.append(error)
    return torch.stack(found).reshape(len(found), -1)
