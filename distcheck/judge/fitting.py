"""A tensor, or a set of them, as a combination of others, by least squares: the one fit that names
factors and weights, of `verify` and `job` alike. Oracles do without it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from distcheck.machine.numerics import wide

_ROWS = 1 << 15  # that are factored at once, so that nothing is copied whole


class LeastSquaresFit(NamedTuple):
    """What fits best, one factor for each base.

    left      the L2 norm of what the combination leaves over
    size      that of what was fitted
    apart     the least singular value of the bases over the largest: where it is tiny, they are
              multiples of each other, and the factors mean nothing
    moved_by  how far each factor moves at most for an error of 1 in what was fitted
    """

    factors: tuple[float, ...]
    left: float
    size: float
    apart: float
    moved_by: tuple[float, ...]

    @property
    def share(self) -> float:
        return self.left / self.size if self.size else 0.0


def fit(rows: Iterable[tuple[torch.Tensor, ...]]) -> LeastSquaresFit | None:
    """Fits the first tensor of each row by the others, with the same factors in all rows; None
    where a base is zero everywhere, or a number is not finite.

    [bases, actual] = Q R is made by rows: the factors and what is left follow from the last R.
    """
    r: torch.Tensor | None = None
    for actual, *bases in rows:
        columns = [wide(one).reshape(-1) for one in (*bases, actual)]
        for start in range(0, len(columns[0]), _ROWS):
            block = torch.stack([one[start : start + _ROWS] for one in columns], dim=1).cpu()
            whole = block if r is None else torch.cat([r, block])
            r = torch.linalg.qr(whole, mode="r").R
    if r is None or not bool(r.isfinite().all()):
        return None
    count = r.shape[1] - 1
    r = torch.cat([r, r.new_zeros(max(0, count + 1 - len(r)), count + 1)])
    system, target = r[:, :count], r[:, count]
    singular = torch.linalg.svdvals(system)
    if not bool((system.norm(dim=0) > 0).all()):
        return None
    inverse = torch.linalg.pinv(system)
    factors = inverse @ target
    return LeastSquaresFit(
        factors=tuple(factors.tolist()),
        left=float((system @ factors - target).norm()),
        size=float(target.norm()),
        apart=float(singular[-1] / singular[0]),
        moved_by=tuple(inverse.norm(dim=1).tolist()),
    )
