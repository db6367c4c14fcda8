"""Measures the rounding of the full batch in a single process, for layouts that full batch float32
rejects.

The bounds of full batch float32 use the size of a result as the size of its summands. If nearly
equal numbers cancel, in the model's last sum, in a loss, or when gradients of two branches are
added, the summands are larger, and so is the rounding, in one process as well. Ranks that share a
model split their sums and round differently, and no rank's arithmetic can be reproduced bitwise in
one process. So the rounding of the reference is measured: the full batch is rerun with parameters
that are each perturbed by ±1 ULP at random. In float32 no parameter is known more precisely, and
every product and sum then rounds differently (Parker, Monte Carlo Arithmetic, UCLA CSD-970002,
1997). Both results are right, and differ only by rounding.

If the difference exceeds `_UNUSUAL` of the bound, the bound does not hold for this model, and an
error of at most `_LIKE_ROUNDING` times the difference may be rounding, too: the check is unknown.
Otherwise the bound holds. It is never widened, so nothing passes because of this.

A norm over few numbers may be small by chance. For such norms, `_DRAWS` runs are made, and the
largest counts, unless the error is so large (`_BEYOND_CHANCE`) that the first run decides.
"""

from collections.abc import Callable

import torch

from distcheck.judge.oracles.full_batch import FullBatch, FullBatchReference
from distcheck.machine.numerics import distance

# Heuristic: errors within this ratio are of one kind.
_LIKE_ROUNDING = 16.0
# Heuristic: correct code reached a third of the bounds of full batch float32, mostly a tenth.
_UNUSUAL = 0.25
_DRAWS, _FEW = 4, 64
# Heuristic: a normally distributed number is below 1/256 of its deviation in 3 of 1,000 draws.
_BEYOND_CHANCE = 256.0

Taken = Callable[[FullBatch], torch.Tensor | None]


class OwnRounding:
    """The rounding of the reference at one step."""

    def __init__(self, reference: FullBatchReference, step: int, whole: FullBatch) -> None:
        self._reference, self._step, self._whole = reference, step, whole
        self._moved: list[FullBatch] = []

    def allows(self, taken: Taken, *, error: float, bound: float) -> float:
        """Return the largest L2 error that may be rounding in a tensor `taken` from the full batch,
        given an `error`; 0 if the `bound` holds.
        """
        right = taken(self._whole)
        if right is None:
            return 0.0
        own, draws = 0.0, _DRAWS if right.numel() < _FEW else 1
        for draw in range(draws):
            again = taken(self._run(draw))
            apart = 0.0 if again is None else distance(again, right)
            own = max(own, apart if apart < float("inf") else 0.0)  # also if it is NaN
            if error > _BEYOND_CHANCE * _LIKE_ROUNDING * own > 0:
                break
        return _LIKE_ROUNDING * own if own > _UNUSUAL * bound else 0.0

    def _run(self, draw: int) -> FullBatch:
        while len(self._moved) <= draw:
            self._moved.append(self._reference.run(self._step, moved=len(self._moved)))
        return self._moved[draw]
