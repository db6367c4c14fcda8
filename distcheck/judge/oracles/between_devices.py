"""full batch float32 where the ranks' device is another one than the reference's: how much further
gradients may be off.

What full batch float32 refuses is there taken for right up to this much more: twice what moves
where samples are put on other sides of kinks (`kinks.py`), and twice the reference's own distance
from float64. The latter is rounding that the bound of full batch float32 does not count: the exact
gradient of a bias in front of BatchNorm is zero, and what is left of it grows with a layer's mean
beside its deviation. A GPU rounds so as well, in its own way; both errors add up.
"""

from collections.abc import Mapping, Sequence

import torch

from distcheck.judge.oracles import kinks
from distcheck.judge.oracles.forms import Gradients
from distcheck.judge.oracles.full_batch import norm
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import distance

# Measured allowance: 1.17 of the tolerance in all, once, of VGG11 on an H100.
_OWN_ERRORS = 2.0
# Chosen: of an error that may come from kinks that are not looked at, in its gradient's size.
_UNDECIDED = 2.0

EXCUSE = (
    "at some steps rounding decides on which side of a kink (of a ReLU, of a maximum) samples are, "
    "or is large beside what is left of a sum, and another device rounds otherwise: there "
    "gradients may be further off, by twice what putting these samples on the other side moves "
    "them by and by twice the reference's own distance from float64"
)

_OTHER_KINKS = (
    "another device rounds otherwise, and puts other samples on other sides of a kink; there are "
    "kinks here by which gradients may move, and by how much is not known ({}): float32 does not "
    "show whether they are right"
)


def allowed(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> tuple[dict[int, float], dict[int, float], str]:
    """Of what is refused, by its index: how much further it may be off, as an L2 norm; up to which
    error it decides nothing, where it is further off than that; and why, if by kinks.
    """
    further, others = kinks.between_devices(at, [*refused])
    rounding = {}
    for index, too_far in refused.items():
        right, bound = expected[index], tolerances[index]
        if right is None:
            continue
        error = max(distance(one, right) for one in too_far)
        if not error <= bound + further[index]:  # float64 takes ten times as long
            further[index] += _OWN_ERRORS * _own_error(at, index, right)
        if not error <= bound + further[index]:
            own = at.own_rounding.allows(
                lambda batch, index=index: batch.gradients[index],  # type: ignore[misc]
                error=error,
                bound=bound,
            )
            rounding[index] = max(own, _UNDECIDED * norm(right) if others else 0.0)
    return further, rounding, _OTHER_KINKS.format(", ".join(others)) if others else ""


def _own_error(at: AtStep, index: int, right: torch.Tensor) -> float:
    """How far the reference's gradient is from that in float64, as an L2 norm."""
    try:
        exact = at.in_double.full_batch.gradients[index]
        return 0.0 if exact is None else distance(right, exact)
    except Exception:  # theirs: not every workload computes in float64
        return 0.0
