"""An update after clipping, where each rank holds pieces of the gradients.

Ranks add up the squares of n numbers in another order than one process does. The relative error
of such a sum grows like u sqrt(n) (as in `full_batch.py`), and that of its root is half of that. So
the update is computed again for a norm that is larger and smaller by so much, with 8 u of room for
the roundings of root, quotient and product. What the results differ by is how far the update may be
from the one that is expected, as an L2 norm, with one rounding of the parameters themselves beside.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch

from distcheck.judge.oracles.at_step import AtStep
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import real_parts, unit_roundoff
from distcheck.recordings.recording import Kind

EXCUSE = (
    "the norm of all gradients is added up over the ranks' pieces, in another order than in one "
    "process: the update is compared within what that may change"
)
_ROOM = 8.0  # Derived: one rounding each for root, sum, quotient and product, and as many here


def tolerances(at: AtStep, rank: int) -> Mapping[Kind, Sequence[float]]:
    """How far each tensor may be from what is expected after a rank's step; nothing where bits are
    expected.
    """
    if at.training.clip_norm is None or at.contract.optimizer_state != "cut":
        return {}
    elements = sum(spec.elements for spec in at.specs)
    unit = unit_roundoff(at.ingredients.dtype)
    relative = unit * (sqrt(elements) / 2 + _ROOM)
    try:
        exact, more, less = (
            at.references.update.run(rank, at.step, clip_factor=factor)
            for factor in (1.0, 1.0 + relative, 1.0 - relative)
        )
    except NotRecordedError:
        return {}
    return {
        kind: [
            max(_apart(one, other) for other in others) + unit * _apart(one, None)
            for one, *others in zip(exact[kind], more[kind], less[kind], strict=True)
        ]
        for kind in exact
    }


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The L2 norm of a difference; of one tensor where there is no other."""
    if one is None:
        return 0.0
    wide = real_parts(one).double()
    return float((wide if other is None else wide - real_parts(other).double()).norm())
