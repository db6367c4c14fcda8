"""Additional tolerance of gradients in full batch float32, if the ranks' device differs from the
reference's.

A gradient that full batch float32 rejects is then accepted up to an additional tolerance. It is
twice the gradient's change when samples move to other sides of kinks (`kinks.py`), plus twice the
distance of the reference from float64. The latter is rounding outside the bound of full batch
float32: the exact gradient of a bias in front of BatchNorm is zero, and its rounding error grows
with a layer's mean relative to its deviation. A GPU also rounds like that, but differently; both
errors add.
"""

from collections.abc import Mapping, Sequence

import torch

from distcheck.judge.oracles import kinks
from distcheck.judge.oracles.forms import Gradients
from distcheck.judge.oracles.full_batch import finite_norm
from distcheck.judge.oracles.references import AtStep
from distcheck.machine.numerics import distance

# Measured: 1.17 of the tolerance in all, once, for VGG11 on an H100.
_OWN_ERRORS = 2.0
# Heuristic: an error possibly from kinks that are not examined, relative to its gradient.
_UNDECIDED = 2.0

EXCUSE = (
    "at some steps rounding decides on which side of a kink (of a ReLU or a maximum) samples "
    "lie, or is large relative to a sum that cancels, and devices round differently: at these "
    "steps the bound also includes twice the change from moving these samples to the other side, "
    "and twice the reference's own distance from float64"
)

_OTHER_KINKS = (
    "devices round differently, which may move samples across a kink; the resulting change of "
    "the gradients is not known here ({}), so float32 cannot show whether they are right"
)


def tolerances_between_devices(
    at: AtStep,
    expected: Gradients,
    tolerances: Sequence[float],
    refused: Mapping[int, Sequence[torch.Tensor]],
) -> tuple[dict[int, float], dict[int, float], str]:
    """Return three values for rejected gradients: additional tolerances as L2 norms, by index;
    errors up to which a larger deviation is undecided, by index; and the reason, if it is kinks.
    """
    further, others = kinks.device_tolerances(at, [*refused])
    rounding = {}
    for index, too_far in refused.items():
        right, bound = expected[index], tolerances[index]
        if right is None:
            continue
        error = max(distance(one, right) for one in too_far)
        if not error <= bound + further[index]:  # float64 takes ten times as long
            further[index] += _OWN_ERRORS * _reference_error(at, index, right)
        if not error <= bound + further[index]:
            own = at.own_rounding.allows(
                lambda batch, index=index: batch.gradients[index],  # type: ignore[misc]
                error=error,
                bound=bound,
            )
            rounding[index] = max(own, _UNDECIDED * finite_norm(right) if others else 0.0)
    return further, rounding, _OTHER_KINKS.format(", ".join(others)) if others else ""


def _reference_error(at: AtStep, index: int, right: torch.Tensor) -> float:
    """Return the L2 distance of the reference's gradient from that in float64."""
    try:
        exact = at.in_double.full_batch.gradients[index]
        return 0.0 if exact is None else distance(right, exact)
    except Exception:  # a workload may not compute in float64
        return 0.0
