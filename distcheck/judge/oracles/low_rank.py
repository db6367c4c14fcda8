"""Required results of low-rank compression with error feedback (PowerSGD): `--accept
low-rank:RANK`.

Vogels, Karimireddy and Jaggi (arXiv:1905.13727). Rank r adds to its gradient g_r the residual of
earlier steps, a_r = g_r + e_r, seen as a matrix of n rows. All ranks agree on a matrix P, n x RANK,
of unit columns; their result is

    y  =  P Q^T,     Q  =  mean of a_r^T P   (two all-reduces of small matrices)

and rank r keeps e_r = a_r - y for the next step. The choice of P is up to the strategy. For every
choice the following holds, which can be checked without the strategy's data:

1. e_r adds up: the mean of a_r at step t is M = g(t) + sum over s < t of (g(s) - y(s)), with g the
   mean of the shards' gradients and y what was recorded. Without feedback M is g(t) alone.
2. y = P P^T M: its rank is at most RANK,
3. and if P is orthonormal, y is the orthogonal projection of M on its own columns:
   y^T (M - y) = 0.
   The two are equivalent: a y of rank RANK with y^T M = y^T y has U^T M = U^T y for its left
   singular vectors U, so y = U U^T M. A y that is scaled, or computed from other gradients, does
   not satisfy this.

A power iteration may alternate between the sides: y = M Q Q^T, with Q of unit columns, is also
right. Then all of this holds for the transposed matrices, with their n. A result is right if it
satisfies either form.

In floating point y = P P^T M + E. The origin of P does not matter, since both products use the same
P. The terms of Q are inner products of n numbers; W of them are summed and divided; the second
product sums RANK terms; and a_r includes two roundings per step. With u of the gradients' dtype,
A_r = |g_r| + the magnitudes of all terms that were added and subtracted, and |P|_F^2 = RANK

    |E|_F  <=  gamma(n + W + RANK + 4 + 2 t) RANK sum_r w_r |A_r|_F  =: eps

so beyond RANK the singular values of y add up to eps at most (in the L2 norm), and

    |y^T (M - y)|_F  <=  eps (|M|_F + 2 |y|_F)  +  c gamma(n + 4) |y|_F^2

where the last term accounts for P not being exactly orthonormal. A single column is a unit vector
up to gamma(n + 4): c = 1. Two columns after Gram-Schmidt are orthogonal up to u times the condition
number of their input. The error includes this number times |p_1^T M| |p_2^T M|, which has the size
of |y|_F^2 unless the directions were very ill-conditioned: c = 100, a relative 2e-3 for 256 rows in
float32.

Uncompressed tensors (vectors, small matrices, all in the first steps) must be M itself within the
rounding bound, with A_r for g_r and 2 t more roundings. A tensor is right if it satisfies either.
It is wrong if it is zero (at most eps) and M is not (by the rounding bound), or if M is exactly
zero and the tensor is not. The distance of y from M is reported, but not checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch

from distcheck.judge.oracles.compression import CompressedFit, CompressedForm
from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import gamma

# Measured: c of the module docstring. Two power iterations and Gram-Schmidt in float32, with 64 to
# 1,024 rows and rank 2 to 8, reached 0.06.
_UNORTHOGONAL = 100.0


@dataclass(frozen=True)
class Projection(CompressedForm):
    """The input of one tensor's compression. A result must equal it, or its projection on at most
    `rank` directions.

    mean   M over the ranks (float64)
    bound  tolerance of a right mean
    size   norm of all terms that were added
    unit   unit roundoff of the gradients' dtype
    """

    mean: torch.Tensor
    bound: torch.Tensor
    size: float
    steps_before: int
    rank: int
    world: int
    unit: float

    def fit(self, result: torch.Tensor) -> CompressedFit:
        return _fit_to_projection(result, self)

    def without(self, result: torch.Tensor, rank: int, part: torch.Tensor) -> torch.Tensor:
        """Return the part's projection onto the column space of the result, as a model."""
        rows = result.shape[0] if result.dim() else 1
        if result.dim() < 2 or min(rows, result.numel() // rows) <= self.rank:
            return part
        matrix = result.double().reshape(rows, -1)
        columns, values, _ = torch.linalg.svd(matrix, full_matrices=False)
        # Measured: a product of rank r in float32 has further singular values of up to 4e-8 of the
        # first. Decides only which mistakes are tried.
        if float(values[self.rank]) > 1e-3 * float(values[0]):
            return part  # this step compressed nothing
        basis = columns[:, : self.rank]
        kept: torch.Tensor = basis @ (basis.T @ part.reshape(rows, -1))
        return kept.reshape(part.shape)


def compression_input(
    now: Interval,
    earlier: Sequence[tuple[Interval, torch.Tensor]],
    *,
    rank: int,
    world: int,
    unit: float,
) -> Projection:
    """Return M of one tensor. It is computed from the interval of this step's mean and, with
    feedback, the (interval, result) of every earlier step. An interval's bound is at least gamma(W
    + 1) times its magnitude, so the magnitude is derived from the bound.
    """
    least = gamma(world + 1, unit)
    mean, size = now.mean.clone(), now.bound / least
    for before, result in earlier:
        y = result.to(mean.device).double()
        mean += before.mean - y
        size = size + before.bound / least + y.abs()
    bound = now.bound
    if earlier:
        bound = bound + gamma(world + 5 + 2 * len(earlier), unit) * size
    return Projection(mean, bound, float(size.norm()), len(earlier), rank, world, unit)


def _fit_to_projection(result: torch.Tensor, form: Projection) -> CompressedFit:
    """Return the fit of `result` to M itself, or to a projection of M."""
    y, mean = result.to(form.mean.device).double(), form.mean
    distance = (y - mean).abs()
    if bool((distance <= form.bound).all()):
        return CompressedFit(float(distance.norm()), float(form.bound.norm()), 1.0)
    failed = CompressedFit(float(distance.norm()), float(form.bound.norm()), 0.0, "not the mean")
    rows = y.shape[0] if y.dim() else 1
    if y.dim() < 2 or min(rows, y.numel() // rows) <= form.rank or not bool(y.isfinite().all()):
        return failed
    matrix, wanted = y.reshape(rows, -1), mean.reshape(rows, -1)
    found = _is_left_projection(matrix, wanted, form)
    if found.why:
        other = _is_left_projection(matrix.T, wanted.T, form)
        return found if other.why else other
    return found


def _is_left_projection(
    matrix: torch.Tensor, wanted: torch.Tensor, form: Projection
) -> CompressedFit:
    """Test if a matrix is P P^T M for a P of orthonormal columns."""
    rows, whole, rank, unit = len(matrix), float(form.mean.norm()), form.rank, form.unit
    eps = gamma(rows + form.world + rank + 4 + 2 * form.steps_before, unit) * rank * form.size
    columns, values, _ = torch.linalg.svd(matrix, full_matrices=False)
    norm, tail = float(values.norm()), float(values[rank:].norm())
    if norm <= eps:
        if bool((form.mean.abs() <= form.bound).all()):  # gradients cancel: zero is their mean
            return CompressedFit(norm, eps, 1.0)
        return CompressedFit(whole, eps, 0.0, "zero, but the mean is not")
    if whole == 0.0:
        return CompressedFit(norm, eps, 0.0, "nonzero, but the mean is zero")
    if tail > eps:
        found = int((values > eps / sqrt(len(values))).sum())
        return CompressedFit(
            tail, eps, norm / whole, f"not the mean, and of rank {found} instead of {rank}"
        )
    inner = columns[:, :rank].T @ (wanted - matrix)
    error = float((values[:rank, None] * inner).norm()) / norm
    slack = 1.0 if rank == 1 else _UNORTHOGONAL
    bound = eps * (whole / norm + 2.0) + slack * gamma(rows + 4, unit) * norm
    if error <= bound:
        return CompressedFit(error, bound, norm / whole)
    along = float((matrix * wanted).sum()) / norm**2
    why = "of an allowed rank, but not a projection of the mean plus the error feedback"
    return CompressedFit(
        error, bound, norm / whole, f"{why} ({1 / along if along else 0:.4g} times one)"
    )
