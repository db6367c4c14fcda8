"""How far rounding alone takes the whole batch in one process, for what full batch float32 refuses
in a layout.

the bounds of full batch float32 take the size of a result for the size of what is added up in it.
Where nearly equal numbers cancel, in the model's last sum, in a loss, or where two branches of a
network hand back their gradients, what is added up is larger, and so is its rounding, in one
process as well. Ranks that share a model split their sums, so their roundings are others, and no
rank's arithmetic can be repeated to the bit in one process. So the reference's own rounding is
measured: the whole batch is run again from parameters that are each moved by one unit in the last
place, up or down by a seeded draw. In float32 no parameter is known more closely, and every product
and sum then rounds in another way (Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997). Both
results are right, and rounding is all that sets them apart.

Where that is more than `_UNUSUAL` of the bound, the bound does not hold for this model, and an
error of at most `_LIKE_ROUNDING` times as much may be rounding alone: the check is unknown.
Elsewhere the bound stands. It is never wider, so nothing passes by this.

A norm over few numbers may be small by chance. Of those, `_DRAWS` runs are taken, and the largest
counts, unless the error is so large (`_BEYOND_CHANCE`) that the first one decides.
"""

from collections.abc import Callable

import torch

from distcheck.judge.oracles.full_batch import FullBatch, FullBatchReference
from distcheck.machine.numerics import distance

# Chosen: two ways of rounding that are this many times apart are one kind of error.
_LIKE_ROUNDING = 16.0
# Chosen: correct code was measured at up to a third of the bounds of full batch float32, most of it
# at a tenth.
_UNUSUAL = 0.25
_DRAWS, _FEW = 4, 64
# Chosen: a normally distributed number is below 1/256 of its deviation in 3 of 1,000 draws.
_BEYOND_CHANCE = 256.0

Taken = Callable[[FullBatch], torch.Tensor | None]


class OwnRounding:
    """That of one step."""

    def __init__(self, reference: FullBatchReference, step: int, whole: FullBatch) -> None:
        self._reference, self._step, self._whole = reference, step, whole
        self._moved: list[FullBatch] = []

    def allows(self, taken: Taken, *, error: float, bound: float) -> float:
        """The largest error that may be rounding alone in what is `taken` of a whole batch, as an
        L2 norm, where one of `error` was found; 0 where the `bound` holds.
        """
        right = taken(self._whole)
        if right is None:
            return 0.0
        own, draws = 0.0, _DRAWS if right.numel() < _FEW else 1
        for draw in range(draws):
            again = taken(self._run(draw))
            apart = 0.0 if again is None else distance(again, right)
            own = max(own, apart if apart < float("inf") else 0.0)  # also where it is NaN
            if error > _BEYOND_CHANCE * _LIKE_ROUNDING * own > 0:
                break
        return _LIKE_ROUNDING * own if own > _UNUSUAL * bound else 0.0

    def _run(self, draw: int) -> FullBatch:
        while len(self._moved) <= draw:
            self._moved.append(self._reference.run(self._step, moved=len(self._moved)))
        return self._moved[draw]
