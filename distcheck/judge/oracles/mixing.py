"""Expectations for ranks that average with neighbors: `--accept gossip`.

D-PSGD (Lian et al., arXiv:1705.09056), SGP on regular graphs (Assran et al., arXiv:1811.10792) and
pairwise averages (AD-PSGD, arXiv:1710.06952). After each step rank r holds

    p_r  =  sum_s W[r, s] u_s

with u_s the parameters of rank s after its own step, and W doubly stochastic: rows and columns sum
to one. With `combine-first` (algorithm 1 of D-PSGD) ranks mix the parameters before the step, and
the step is by the gradient at the rank's own parameters: p_r = sum_s W[r, s] p_s + (u_r - p_r).

- Rows that sum to one keep a common value. Columns that sum to one keep the mean of all ranks,
  because sum_r p_r = sum_s u_s sum_r W[r, s]. The deviation from the mean shrinks in each step at
  least by the second largest singular value of W (the report has that of all steps together).
- |actual - p_r|  <=  gamma(W + 3) sum_s W[r, s] |u_s|  +  (W + 3) tiny, as for gradients of unequal
  weights (`rounding`). With `combine-first`, the update u_r - p_r is that of a recomputed step: it
  has the roundings of u_r, and adding it rounds once more, so 2 u (|p_r| + |u_r - p_r| + |actual|)
  is added. This assumes an update that does not depend on parameters; weight decay has no bound.

If no matrix is given, it is found at each step by least squares, and replaced by the doubly
stochastic matrix with the same neighbors (Sinkhorn and Knopp). That is the same matrix if it is
doubly stochastic. Otherwise the comparison fails. A matrix (or a product over all steps) that does
not connect all ranks has no verdict.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from distcheck.judge.designs import matrix_of
from distcheck.judge.oracles.design import (
    Mistake,
    ParameterDesign,
    Updates,
    UpdatesAt,
    agree_bitwise,
)
from distcheck.judge.oracles.forms import Combination
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.machine.numerics import NotBoundedError, as_float64, unit_roundoff
from distcheck.recordings.recording import Kind

Matrix = tuple[tuple[float, ...], ...]
_DENOMINATORS = 64
_NEAR = 1e-3  # Heuristic: least squares reach 1e-5 where ranks differ by a thousandth


class Gossip(ParameterDesign):
    """Means of neighbors, by a matrix."""

    def __init__(self, references: Any, accepted: Any) -> None:
        super().__init__(references, accepted)
        self._found: dict[int, Matrix] = {}

    @property
    def _first(self) -> bool:
        return bool(self.accepted["when"])

    def combines(self, step: int, kind: Kind, index: int) -> bool:
        return kind is Kind.PARAMETER

    def agreeing(self, step: int, index: int) -> Sequence[Sequence[int]]:
        return []

    def matrix(self, step: int, updates: Updates) -> Matrix:
        """Return the expected matrix of a step. Raises NotBoundedError."""
        if self._first and self.references.update.decays_parameters:
            raise NotBoundedError(
                "weight decay depends on the combined parameters, which gossip:combine-first does "
                "not expect"
            )
        given = matrix_of(str(self.accepted["matrix"]), len(updates), step)
        if given is not None:
            return given
        if step not in self._found:
            self._found[step] = self.measured(step, updates)
            if step == self.trace.steps_written() - 1:
                self._require_connection(updates)
        return doubly_stochastic(self._found[step])

    def measured(self, step: int, updates: Updates) -> Matrix:
        """Return the weights with which ranks hold each other's parameters, by least squares."""
        count, world = len(self.trace.layout.model.parameters), len(updates)
        normal = torch.zeros(world, world, dtype=torch.float64)
        wanted = torch.zeros(world, world, dtype=torch.float64)
        for index in range(count):
            terms = self._terms(step, index, updates)
            held = [self.trace.tensor(r, Kind.PARAMETER, step + 1, index) for r in range(world)]
            if any(one is None for one in (*terms, *held)):
                continue
            sent = torch.stack([as_float64(one).flatten() for one in terms if one is not None])
            ends = torch.stack([as_float64(one).flatten() for one in held if one is not None])
            if self._first:
                own = [one[Kind.PARAMETER][index] for one in updates]
                ends = ends - torch.stack([as_float64(o).flatten() for o in own if o is not None])
                ends = ends + sent
            normal += sent @ sent.T
            wanted += sent @ ends.T
        solved = torch.linalg.lstsq(normal, wanted, driver="gelsd").solution.T
        return tuple(_snapped(row) for row in solved.tolist())

    def _terms(self, step: int, index: int, updates: Updates) -> list[torch.Tensor | None]:
        """Return the tensors that ranks exchange."""
        if self._first:
            ranks = range(len(updates))
            return [self.trace.tensor(rank, Kind.PARAMETER, step, index) for rank in ranks]
        return [own[Kind.PARAMETER][index] for own in updates]

    def combined(
        self, step: int, kind: Kind, index: int, updates: Updates
    ) -> Sequence[Combination | None]:
        return self._by_matrix(self.matrix(step, updates), step, index, updates)

    def _by_matrix(
        self, matrix: Matrix, step: int, index: int, updates: Updates
    ) -> list[Combination | None]:
        terms = [one for one in self._terms(step, index, updates) if one is not None]
        if len(terms) < len(updates):
            return [None] * len(updates)
        found = []
        for rank, weights in enumerate(matrix):
            mixed = interval(terms, weights)
            if self._first:
                mixed = self._and_update(mixed, terms[rank], updates[rank][Kind.PARAMETER][index])
            found.append(Combination(mixed, tuple(terms), weights))
        return list(found)

    def _and_update(
        self, mixed: Interval, before: torch.Tensor, after: torch.Tensor | None
    ) -> Interval:
        assert after is not None
        moved = as_float64(after) - as_float64(before)
        mean = mixed.mean + moved
        size = as_float64(before).abs() + moved.abs() + mean.abs()
        return Interval(mean, mixed.bound + 2 * unit_roundoff(after.dtype) * size)

    def _require_connection(self, updates: Updates) -> None:
        """Raise NotBoundedError if some ranks never exchange anything, at any step."""
        product = torch.eye(len(updates), dtype=torch.float64)
        for step in range(self.trace.steps_written()):
            if step not in self._found:  # another process judges it
                run = self.references.update.run
                self._found[step] = self.measured(
                    step, [run(rank, step) for rank in range(len(updates))]
                )
            if self._first and agree_bitwise(self.trace, step, range(len(updates))):
                continue  # a mean of equal parameters does not show who mixed
            product = torch.tensor(self._found[step], dtype=torch.float64) @ product
        if float(torch.linalg.svdvals(product)[1]) > 1 - _NEAR:
            raise NotBoundedError(
                "some ranks never mix with the others: a combination that does not connect all "
                "ranks has nothing to check"
            )

    def remark(self) -> str:
        if not self._found:
            return ""
        step, matrix = max(self._found.items())
        return f"the mixing matrix after step {step} is {spell_matrix(matrix)}"

    def wrong_combinations(self, step: int, updates: Updates) -> Iterator[Mistake]:
        found = self.measured(step, updates)
        sums = [[sum(row) for row in found], [sum(column) for column in zip(*found, strict=True)]]
        wrong = [
            f"{name} sum to {', '.join(f'{one:.4g}' for one in values)}"
            for name, values in zip(("rows", "columns"), sums, strict=True)
            if any(abs(one - 1) > _NEAR for one in values)
        ]
        what = f"the ranks' parameters are mixed by the matrix {spell_matrix(found)}"
        if wrong:
            what += f", which is not doubly stochastic: its {' and its '.join(wrong)}"
        yield what, lambda k, i: self._by_matrix(found, step, i, updates)
        other = Gossip(
            self.references, self.accepted.having(when="" if self._first else "combine-first")
        )
        when = "after" if self._first else "before"
        yield (
            f"the ranks' parameters are mixed {when} the optimizer's step",
            lambda k, i: other.combined(step, k, i, updates),
        )

    @classmethod
    def candidates(cls, references: Any, updates_at: UpdatesAt) -> Iterator[str]:
        if references.trace.layout.world > 1:
            for matrix in ("ring", "exponential", ""):
                for when in ("", ":combine-first"):
                    yield f"gossip{':' * bool(matrix)}{matrix}{when}"


def _snapped(row: Sequence[float]) -> tuple[float, ...]:
    """Return weights as fractions of one small denominator, if they are near such."""
    for bottom in range(1, _DENOMINATORS + 1):
        tops = [round(weight * bottom) for weight in row]
        if all(
            abs(top / bottom - one) < _NEAR / bottom for top, one in zip(tops, row, strict=True)
        ):
            return tuple(top / bottom for top in tops)
    return tuple(row)


def doubly_stochastic(matrix: Matrix) -> Matrix:
    """Return the doubly stochastic matrix with the same neighbors, by Sinkhorn's iteration: the
    same matrix if it is doubly stochastic.
    """
    found = torch.tensor(matrix, dtype=torch.float64)
    for _ in range(1000):
        rows, columns = found.sum(1), found.sum(0)
        # Derived: above the rounding of a sum of a thousand weights in float64.
        if bool(((rows - 1).abs() < 1e-12).all()) and bool(((columns - 1).abs() < 1e-12).all()):
            return matrix if _ == 0 else tuple(tuple(row) for row in found.tolist())
        if not bool((found.sum(1) > 0).all()) or not bool((found.sum(0) > 0).all()):
            break
        found = found / found.sum(1, keepdim=True)
        found = found / found.sum(0, keepdim=True)
    world = len(matrix)
    return ((1.0 / world,) * world,) * world


def spell_matrix(matrix: Matrix) -> str:
    """Return the rows of a matrix of up to 8 ranks, as `--accept gossip:...` takes them."""
    if len(matrix) > 8:
        return f"of {len(matrix)} ranks with {sum(1 for w in matrix[0] if w)} neighbors of rank 0"
    rows = [",".join(_fraction(weight) for weight in row) for row in matrix]
    return "_".join(rows)


def _fraction(weight: float) -> str:
    near = Fraction(weight).limit_denominator(_DENOMINATORS)
    # Derived: two fractions with such denominators differ by at least 1 / 64**2.
    return str(near) if abs(float(near) - weight) < 1e-9 else f"{weight:.4g}"
