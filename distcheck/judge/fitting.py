"""Least-squares fits of tensors to combinations of tensors, on which factors and weights in
`verify` and `job` are based. Oracles do not use them.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from distcheck.machine.numerics import as_float64

_ROWS = 1 << 15  # factored at once, so that nothing is copied whole


class LeastSquaresFit(NamedTuple):
    """The best fit, with one factor per base.

    left      L2 norm of the residual
    size      L2 norm of the fitted tensors
    `apart`   ratio of the smallest to the largest singular value of the bases; if it is tiny, bases
              are multiples of each other, and the factors mean nothing
    moved_by  largest change of each factor for an error of 1 in the fitted tensors
    """

    factors: tuple[float, ...]
    left: float
    size: float
    apart: float
    moved_by: tuple[float, ...]

    @property
    def share(self) -> float:
        return self.left / self.size if self.size else 0.0


def fit_least_squares(rows: Iterable[tuple[torch.Tensor, ...]]) -> LeastSquaresFit | None:
    """Fit the first tensor of each row by the remaining ones, with the same factors in all rows.
    Return None if a base is zero everywhere, or if an element is not finite. [bases, actual] = Q R
    is computed block by block: factors and residual follow from the last R.
    """
    r: torch.Tensor | None = None
    for actual, *bases in rows:
        columns = [as_float64(one).reshape(-1) for one in (*bases, actual)]
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
