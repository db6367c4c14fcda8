"""Measures one step of a failed case: computes the numbers in `facts` from tensors, in float64.

Expectations come from the oracles; nothing here depends on a strategy's implementation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import isfinite, sqrt
from typing import NamedTuple

import msgspec
import torch

from distcheck.judge.diagnosis import backward, gradients
from distcheck.judge.diagnosis.measured import MeasuredParameter, StepView
from distcheck.judge.diagnosis.measurements import (
    GradientFit,
    GradientMatch,
    Measurements,
    NonFiniteGradient,
    ParameterFacts,
    StepFacts,
)
from distcheck.judge.fitting import fit_least_squares
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import as_float64, gamma, real_parts, smallest, unit_roundoff
from distcheck.records import Diagnosis, TensorSpec

_MOST_SORTED = 1 << 20
_MOST_OTHERS = 64
# Two sorted samples of one distribution converge with their size: to 1e-3 of their norm for a
# million. Heuristic: a bound wider than a tenth of that proves no permutation.
_SHARPEST = 1e-4


def find_matches(
    view: StepView,
    earlier: Sequence[StepView],
    measured: list[MeasuredParameter],
    step_gamma: float,
) -> Iterator[GradientMatch]:
    """Yield every match of a wrong gradient, within the bound of the matched tensor."""
    for one in measured:
        if one.wrong and bool(one.interval.mean.isfinite().all()):
            yield from _earlier(view, earlier, one, step_gamma)
            yield from _match_other_means(one, measured)
            yield from _match_mixed_means(view, one, measured, step_gamma)
    yield from permuted_matches(measured)


def _earlier(
    view: StepView,
    earlier: Sequence[StepView],
    one: MeasuredParameter,
    step_gamma: float,
) -> Iterator[GradientMatch]:
    """Compare with the means and gradients of earlier steps, and their sums with this step's."""
    total, allowed = one.interval.mean, _size(view, one.index)
    for past in earlier:
        interval = past.interval(one.index)
        if interval is None or not bool(interval.mean.any()):
            return
        total, allowed = total + interval.mean, allowed + _size(past, one.index)
        candidates = [
            ("earlier", interval.mean, float(interval.bound.norm())),
            ("sum", total, step_gamma * allowed),
        ]
        for rank in one.wrong:
            held = past.reduced(rank, one.index)
            held = None if held is None else real_parts(held)
            own = list(candidates)
            if held is not None and bool(held.any()):
                limit = _size(view, one.index) + float(held.double().norm())
                own.append(("added", one.interval.mean + held.double(), step_gamma * limit))
                # Gradients that some ranks did not clear are part of the mean.
                ranks = len(view.weights)
                own += [
                    ("left", one.interval.mean + held.double() * k / ranks, step_gamma * limit)
                    for k in range(1, ranks)
                ]
            for kind, expected, bound in own:
                distance = float((one.result(rank) - expected).norm())
                if distance <= bound:
                    yield GradientMatch(
                        kind=kind, rank=rank, parameter=one.name, distance=distance, bound=bound,
                        step=past.step,
                    )  # fmt: skip


def _size(view: StepView, index: int) -> float:
    """Return the summed norms of a mean's summands."""
    size = 0.0
    for rank, (weight, factor) in enumerate(zip(view.weights, view.unscaled, strict=True)):
        gradient = view.local(rank, index)
        if gradient is not None and factor:
            size += weight / len(view.weights) / abs(factor) * float(as_float64(gradient).norm())
    return size


def _match_other_means(
    one: MeasuredParameter, measured: list[MeasuredParameter]
) -> Iterator[GradientMatch]:
    """Compare with the means of other parameters with the same number of elements."""
    alike = [m for m in measured if m.name != one.name and m.elements == one.elements]
    for other in alike[:_MOST_OTHERS]:
        mean = other.interval.mean
        if not bool(mean.any()):
            continue
        bound = float(other.interval.bound.norm())
        for rank in one.wrong:
            distance = float((one.result(rank).reshape(-1) - mean.reshape(-1)).norm())
            if distance <= bound:
                yield GradientMatch(
                    kind="parameter", rank=rank, parameter=one.name, distance=distance,
                    bound=bound, other=other.name,
                )  # fmt: skip


def _match_mixed_means(
    view: StepView, one: MeasuredParameter, measured: list[MeasuredParameter], step_gamma: float
) -> Iterator[GradientMatch]:
    """Compare with means to which some ranks contributed their gradient of another parameter.

    With d_k = share_k * (other's gradient on rank k - this one's), the result is the mean plus the
    sum of d_k over those ranks: least squares selects them, and their exact sum is then tested.
    """
    alike = [m for m in measured if m.name != one.name and m.elements == one.elements]
    world = one.world
    if world < 2 or one.elements > _MOST_SORTED or one.elements <= world:
        return
    shares = [weight / world for weight in view.weights]
    own = torch.stack([one.shard(rank).reshape(-1) for rank in range(world)], dim=1)
    own_norms = own.norm(dim=0).tolist()
    rests = torch.stack(
        [(one.result(rank) - one.interval.mean).reshape(-1) for rank in one.wrong], dim=1
    )
    at_once = max(1, _MOST_SORTED // own.numel())
    for first in range(0, min(len(alike), _MOST_OTHERS), at_once):
        others = alike[:_MOST_OTHERS][first : first + at_once]
        theirs = torch.stack(
            [
                torch.stack([m.shard(rank).reshape(-1) for rank in range(world)], dim=1)
                for m in others
            ]
        )
        gaps = (theirs - own) * torch.tensor(shares, dtype=own.dtype, device=own.device)
        solved = torch.linalg.lstsq(gaps, rests.expand(len(others), *rests.shape)).solution.round()
        norms = theirs.norm(dim=1).tolist()
        for other, gap, taken_by, norm in zip(others, gaps, solved, norms, strict=True):
            size = sum(s * (o + p) for s, o, p in zip(shares, norm, own_norms, strict=True))
            for rank, taken, rest in zip(one.wrong, taken_by.T, rests.T, strict=True):
                ranks = tuple(taken.nonzero().reshape(-1).tolist())
                if not 0 < len(ranks) < world or not bool((taken[list(ranks)] == 1).all()):
                    continue
                distance, bound = float((gap @ taken - rest).norm()), step_gamma * size
                if distance <= bound:
                    yield GradientMatch(
                        kind="mixed", rank=rank, parameter=one.name, distance=distance,
                        bound=bound, other=other.name, ranks=ranks,
                    )  # fmt: skip


def permuted_matches(measured: list[MeasuredParameter]) -> Iterator[GradientMatch]:
    """Match the wrong elements in any order, by sorting them.

    Sorting two vectors never increases their distance. Vectors within a bound of each other have
    norms that differ by at most the bound, so comparing norms, which do not depend on order,
    excludes most candidates without sorting. Elements that are right in place are excluded, since
    their bounds would hide small dropped elements. Bounds of all other elements are doubled: an
    element that a permutation moved onto an equal one counts as unmoved.
    """
    elements = sum(m.elements for m in measured)
    wrong = sorted({rank for m in measured for rank in m.wrong})
    if elements > _MOST_SORTED or not wrong:
        return
    in_place = torch.cat([m.interval.mean.reshape(-1) for m in measured])
    bounds = torch.cat([m.interval.bound.reshape(-1) for m in measured])
    bound = float(bounds.norm())
    norm = float(in_place.norm())
    if bound > _SHARPEST * norm:
        return
    # The norms have roundings, too, in float64 and any order.
    reach = bound + gamma(2 * elements, unit_roundoff(torch.float64)) * norm
    for rank in wrong:
        results = torch.cat([m.result(rank).reshape(-1) for m in measured])
        if float((results - in_place).norm()) <= bound:
            continue  # only single elements are off, which have not moved
        if abs(float(results.norm()) - norm) > reach:
            continue
        moved = (results - in_place).abs() > bounds
        allowed = 2 * float(bounds[moved].norm())
        distance = float((results[moved].sort().values - in_place[moved].sort().values).norm())
        if distance <= allowed:
            for m in measured:
                if rank in m.wrong:
                    yield GradientMatch(
                        kind="permuted", rank=rank, parameter=m.name, distance=distance,
                        bound=allowed,
                    )  # fmt: skip


Counts = tuple[int, ...]  # by rank

_MOST_PARTIAL = 1 << 26  # elements times sets of ranks
# Heuristic: the share of numbers near a result that are within the rounding of a sum of some ranks.
_MOST_BY_CHANCE = 1e-3

_SHORTER = ("float32", "float16", "bfloat16")
# Derived: one rounding has a root mean square error of at least u / (4 sqrt(3)) (half the spacing
# at the top of a binade, uniform), W summands 1 / sqrt(W) of that; the factor of a third is slack.
_LEAST_ROUNDING = 0.05


def mixture_counts(measured: MeasuredParameter, unit: float) -> tuple[Counts, Counts, Counts]:
    """Count per rank the elements that equal the mean, the local gradient, or either."""
    counts: list[tuple[int, int, int]] = []
    interval = measured.interval
    for rank in range(measured.world):
        result, own = measured.result(rank), measured.left(rank)
        mean = (result - interval.mean).abs() <= interval.bound
        alone = (result - own).abs() <= gamma(4, unit) * own.abs()
        counts.append((int(mean.sum()), int(alone.sum()), int((mean | alone).sum())))
    means, owns, eithers = zip(*counts, strict=True)
    return means, owns, eithers


def elements_by_kind(measured: MeasuredParameter, unit: float) -> tuple[tuple[str, Counts], ...]:
    """Count, for each kind and rank, the elements that equal the mean or the value of the kind."""
    world, interval = measured.world, measured.interval
    owns = [measured.left(rank) for rank in range(world)]
    shared = [share * own for share, own in zip(measured.shares, owns, strict=True)]
    total = torch.stack(shared).sum(0) * world
    reach = gamma(4, unit)
    any_ranks = [(one, reach * one.abs()) for one in (*owns, *shared)]
    found: dict[str, list[int]] = {}
    for rank in range(world):
        result, divided = measured.result(rank), owns[rank] / world
        mean = (result - interval.mean).abs() <= interval.bound
        one_of_them = torch.zeros_like(mean)
        for one, bound in any_ranks:
            one_of_them |= (result - one).abs() <= bound
        for kind, same in (
            ("zero", result == 0),
            ("own / W", (result - divided).abs() <= reach * divided.abs()),
            ("sum", (result - total).abs() <= world * interval.bound),
            ("any rank's", one_of_them),
            ("some ranks'", _is_partial_sum(result, [owns, shared], unit)),
        ):
            found.setdefault(kind, []).append(int((mean | same).sum()))
    return tuple((kind, tuple(counts)) for kind, counts in found.items())


def _is_partial_sum(
    result: torch.Tensor, terms: Sequence[Sequence[torch.Tensor]], unit: float
) -> torch.Tensor:
    """Return which elements are the sum over some ranks, but not all, of one list of terms."""
    found, world = torch.zeros_like(result, dtype=torch.bool), len(terms[0])
    if result.numel() << world > _MOST_PARTIAL or unit * 2**world > _MOST_BY_CHANCE:
        return found
    for parts, count in product(terms, range(1, world)):
        for some in combinations(parts, count):
            stacked = torch.stack(some)
            bound = gamma(world + 4, unit) * stacked.abs().sum(0)
            found |= (result - stacked.sum(0)).abs() <= bound
    return found


class MatchingDtype(NamedTuple):
    """A dtype whose roundings match a rank's errors, or "", and two proofs of it."""

    dtype: str = ""
    on_grid: bool = False
    of_terms: bool = False


def matching_dtypes(
    measured: MeasuredParameter, unit: float, own: float
) -> tuple[MatchingDtype, ...]:
    """Return, for each rank, a dtype that the result proves, or else the most precise dtype whose
    roundings match its errors. The size of errors does not distinguish dtypes: a bound for many
    ranks in one dtype covers the roundings of a single rank in the next lower one.
    """
    found = []
    for rank, dtypes in enumerate(_shorter(measured, unit)):
        tried = [
            MatchingDtype(
                d,
                is_representable(measured, rank, d, own),
                is_mean_of_rounded_terms(measured, rank, d),
            )
            for d in reversed(dtypes)
        ]
        shown = [one for one in tried if one.on_grid or one.of_terms]
        found.append((shown or tried[-1:] or [MatchingDtype()])[0])
    return tuple(found)


def _shorter(measured: MeasuredParameter, unit: float) -> list[list[str]]:
    """Return, per rank, the lower-precision dtypes whose roundings match its errors, the most
    precise first.
    """
    mean, ranks = measured.interval.mean, range(measured.world)
    errors = {rank: (measured.result(rank) - mean).abs() for rank in measured.wrong}
    weights = measured.view.weights
    size = sum(w / len(ranks) * float(measured.shard(r).norm()) for r, w in enumerate(weights))
    found: list[list[str]] = [[] for _ in ranks]
    for dtype in _SHORTER if errors else ():
        coarse = unit_roundoff(getattr(torch, dtype))
        if coarse <= unit:
            continue
        wide = measured.view.interval(measured.index, wire=dtype)
        assert wide is not None
        least = _LEAST_ROUNDING * coarse * size / sqrt(len(ranks))
        for rank, error in errors.items():
            if float(error.norm()) >= least and bool((error <= wide.bound).all()):
                found[rank].append(dtype)
    return found


def is_representable(measured: MeasuredParameter, rank: int, dtype: str, own: float) -> bool:
    """Return True if a rank's result, or W times that, is representable in a dtype, up to one
    rounding in dtype `own`. A few elements may be representable by chance.
    """
    grid, result = getattr(torch, dtype), measured.result(rank)
    total = torch.stack([measured.left(r) for r in range(measured.world)]).sum(0)
    if not bool(result.any()) or torch.equal(total.to(grid).double(), total):
        return False  # an unrounded sum is representable, too
    if own > unit_roundoff(grid) / 16:
        return False
    for scaled in (result, result * measured.world):
        rounded = scaled.to(grid).double()
        if bool(((scaled - rounded).abs() <= 2 * own * scaled.abs()).all()):
            return True
    return False


def is_mean_of_rounded_terms(measured: MeasuredParameter, rank: int, dtype: str) -> bool:
    """Return True if a result is the mean of gradients that were each rounded to a dtype, before or
    after weighting, and then added in their original dtype.
    """
    short, world = getattr(torch, dtype), measured.world
    own_dtype = getattr(torch, measured.view.specs[measured.index].dtype)
    own_dtype = own_dtype.to_real() if own_dtype.is_complex else own_dtype
    owns = [measured.left(r) for r in range(world)]
    result, bound = measured.result(rank), 2 * measured.interval.bound
    for before in (1.0, float(world), 0.0):
        total = torch.zeros_like(result)
        for share, own in zip(measured.shares, owns, strict=True):
            weight = share * before if before else 1.0 / world
            rounded = (own * weight).to(own_dtype).to(short).double()
            total += rounded * (share / weight)
        if bool(((result - total).abs() <= bound).all()):
            return True
    return False


MOST_KEPT = 1 << 22  # elements of a model whose means are kept while they are compared
# Larger models are sampled with a stride: a combination holds for every element.
_MOST_ELEMENTS = 1 << 20
# Heuristic: a QR factorization in float64 has an error of a few hundred roundings; this is 9,000 u.
_LEAST_GAMMA = 1e-12
# Heuristic, relative to the largest: below it, ranks' gradients cannot be distinguished.
LEAST_SINGULAR = 1e-6


def explain(
    view: StepView, earlier: Sequence[StepView] = (), later: StepView | None = None
) -> list[Diagnosis]:
    """Return the causes of a step's wrong gradients; `earlier` are previous steps, latest first. If
    there are several causes, only those that also explain the `later` step are returned.
    """
    steps = [StepMeasuring(view, earlier).facts()]
    if later is not None:
        steps.append(StepMeasuring(later, [view, *earlier]).facts())
    facts = [msgspec.structs.replace(one, undeclared=False) for one in steps]
    return gradients.explain(Measurements(world=len(view.ranks), steps=tuple(facts)))


class StepMeasuring:
    """Measures the step of a view; `earlier` are the views of previous steps, latest first."""

    def __init__(self, view: StepView, earlier: Sequence[StepView]) -> None:
        self._view, self._earlier, self._step = view, earlier, view.step
        self._ranks = range(len(view.weights))
        self.shares = [w / len(self._ranks) for w in view.weights]
        self._missing: list[tuple[str, int]] = []
        self._removed: list[str] = []
        self._own_elsewhere = True
        self._not_finite: NonFiniteGradient | None = None
        own = [unit_roundoff(view.wire)] if view.wire else []
        self._least_units: list[float] = [unit_roundoff("float64"), *own]
        count = sum(spec.elements for spec in view.specs)
        self._keeps = ["interval"] if count <= MOST_KEPT else []
        if count * len(self._ranks) <= 4 * MOST_KEPT:  # 3 tensors of at most 0.1 GB each
            self._keeps += ["left", "shard", "result"]

    def facts(self) -> StepFacts:
        """Return all facts of the step. Raises NotRecordedError if the trace lacks required values,
        or a rank discarded its gradient before communication.
        """
        if self._view.lost:
            raise NotRecordedError(self._view.lost)
        measured = self._measure()
        wrong = [m for m in measured if m.wrong]
        # With several dtypes, a coarser one does not excuse a finer one.
        unit = max([*self._least_units, *(self._unit_of(m) for m in wrong or measured)])
        step_gamma = self._gamma_of(unit)
        alone = bool(self._missing) and not wrong and not self._not_finite and self._own_elsewhere
        wrong = [] if self._not_finite else wrong
        others = backward.ranks_with_wrong_local_gradients(self._view, measured)
        if others and wrong and not self._is_right_mean_of_left(wrong):
            # Two mistakes: synchronization is measured relative to its input.
            wrong = [replace(one, to="recorded") for one in wrong]
        parameters = tuple(self._parameter(m, self._unit_of(m)) for m in wrong)
        matches: tuple[GradientMatch, ...] = ()
        if wrong:
            matches = tuple(find_matches(self._view, self._earlier, measured, step_gamma))
        telling = [m for m in measured if m.wrong or self._local_differs_from_mean(m)]
        found = StepFacts(
            step=self._step,
            ranks=self._view.ranks,
            shares=tuple(self.shares),
            **self._view.token_counts,
            gamma=step_gamma,
            unit=unit,
            parameters=parameters,
            total=len(telling),
            silent=len(measured) - len(telling),
            fits=tuple(self._fit(parameters, rank, step_gamma) for rank in self._ranks)
            if parameters
            else (),
            left_norms=tuple(
                sqrt(sum(float(m.left(rank).norm()) ** 2 for m in measured)) for rank in self._ranks
            ),
            left_factors=tuple(
                backward.local_gradient_factor(self._view, r, measured) for r in self._ranks
            ),
            left=others,
            micro_batches=self._view.micro_batches,
            left_elements=sum(m.elements for m in measured),
            matches=matches,
            mean_of_left=self._is_right_mean_of_left(wrong),
            alike=self._groups_of_equal_ranks(),
            unchanged=self._view.unmoved_ranks() if measured else (),
            missing=tuple(self._missing),
            missing_elsewhere=alone,
            removed=tuple(self._removed),
            not_finite=self._not_finite,
        )
        if not (wrong and "result" in self._keeps) or others or len({*self.shares}) == 1:
            return found
        equally = [replace(one, to="equal") for one in wrong]
        self.shares = [1.0 / len(self._ranks)] * len(self._ranks)
        plain = tuple(self._parameter(m, self._unit_of(m)) for m in equally if m.wrong)
        return msgspec.structs.replace(found, plain=plain)

    def _measure(self) -> list[MeasuredParameter]:
        found = []
        for index, spec in enumerate(self._view.specs):
            if all(self._view.local(rank, index) is None for rank in self._ranks):
                continue
            one = self._measure_parameter(index, spec)
            if one is not None:
                found.append(one)
        return found

    def _measure_parameter(self, index: int, spec: TensorSpec) -> MeasuredParameter | None:
        """Measure a parameter; return None if a rank has no gradient. Records inf and NaN."""
        ranks = list(self._ranks)
        missing = [r for r in ranks if self._view.reduced(r, index) is None]
        self._missing += [(spec.name, rank) for rank in missing]
        if missing == ranks:  # a sharded optimizer removes them on all ranks but one
            self._removed.append(spec.name)
        count = spec.elements * (2 if spec.dtype.startswith("complex") else 1)  # both parts
        one = MeasuredParameter(self._view, index, spec.name, count, self._keeps)
        if missing:
            self._own_elsewhere &= self._is_local_where_present(one, missing)
            return None
        interval = one.interval
        for rank in ranks:
            result = one.result(rank)
            for places, hidden in (
                (~result.isfinite(), False),
                (result.isfinite() & ~interval.mean.isfinite(), True),
            ):
                if bool(places.any()) and self._not_finite is None:
                    self._not_finite = NonFiniteGradient(
                        rank=rank,
                        parameter=spec.name,
                        count=int(places.sum()),
                        before=tuple(r for r in ranks if not bool(one.left(r).isfinite().all())),
                        hidden=hidden,
                    )
        return one

    def _local_differs_from_mean(self, measured: MeasuredParameter) -> bool:
        """Return True if some local gradient is not also the mean, as it is if all are zero: then a
        right gradient shows nothing about synchronization.
        """
        interval = measured.interval
        return any(
            not bool(((measured.left(rank) - interval.mean).abs() <= interval.bound).all())
            for rank in self._ranks
        )

    def _unit_roundoff(self, measured: MeasuredParameter) -> float:
        """Return the unit roundoff of one parameter's dtype; a model may have several."""
        parts = [self._view.local(rank, measured.index) for rank in self._ranks]
        return max(unit_roundoff(part.dtype) for part in parts if part is not None)

    def _unit_of(self, measured: MeasuredParameter) -> float:
        """Return the unit roundoff of one parameter's reduction."""
        own = self._unit_roundoff(measured)
        return max(own, unit_roundoff(self._view.wire)) if self._view.wire else own

    def _gamma_of(self, unit: float) -> float:
        roundings = len(self._ranks) + 5 + 2 * (self._view.wire is not None)
        return max(gamma(roundings, unit), _LEAST_GAMMA)

    def _is_local_where_present(self, measured: MeasuredParameter, missing: list[int]) -> bool:
        """Return True if backward produced no gradient on ranks without one, and the other ranks
        hold their local gradients.
        """
        for rank in self._ranks:
            left = self._view.local(rank, measured.index)
            if (left is None) != (rank in missing):
                return False
            if left is not None and not torch.equal(measured.result(rank), left.double()):
                return False
        return True

    def _parameter(self, measured: MeasuredParameter, unit: float) -> ParameterFacts:
        count = measured.elements
        stride = max(1, count // _MOST_ELEMENTS)
        columns = torch.stack(
            [measured.shard(rank).reshape(-1)[::stride] for rank in self._ranks], dim=1
        )
        q, r = torch.linalg.qr(columns)
        taken = [measured.result(rank).reshape(-1)[::stride] for rank in self._ranks]
        projected = [q.T @ y for y in taken]
        of_mean, of_own, of_either = mixture_counts(measured, unit)
        by_rank = matching_dtypes(measured, unit, self._unit_roundoff(measured))
        return ParameterFacts(
            name=measured.name,
            elements=count,
            norms=tuple(columns.norm(dim=0).tolist()),
            basis=tuple(tuple(row) for row in r.tolist()),
            projected=tuple(tuple(p.tolist()) for p in projected),
            remainder=tuple(
                float((y - q @ p).norm()) for y, p in zip(taken, projected, strict=True)
            ),
            floor=sqrt(count) * len(self._ranks) * smallest(self._view.wire or self._view.dtype),
            wrong=measured.wrong,
            of_mean=of_mean,
            of_own=of_own,
            of_either=of_either,
            gamma=self._gamma_of(unit),
            shorter=tuple(one.dtype for one in by_rank),
            on_grid=tuple(one.on_grid for one in by_rank),
            of_terms=tuple(one.of_terms for one in by_rank),
            kinds=elements_by_kind(measured, unit),
            coarse=self._quantum_bounds(count),
        )

    def _quantum_bounds(self, elements: int) -> tuple[float, ...]:
        """Return the quantization bound of the ranks' gradients; all may use the widest grid."""
        widest = max(self._view.half_quanta, default=0.0) * sqrt(elements)
        factors = self._view.unscaled
        return tuple(widest / abs(factor) for factor in factors) if widest else ()

    def _fit(
        self, parameters: tuple[ParameterFacts, ...], rank: int, step_gamma: float
    ) -> GradientFit:
        rows, rest, sizes = list[tuple[torch.Tensor, ...]](), 0.0, []
        for p in parameters:
            size = sum(share * norm for share, norm in zip(self.shares, p.norms, strict=True))
            if size == 0:
                continue
            columns = torch.tensor((p.projected[rank], *zip(*p.basis, strict=True))) / size
            rows.append(columns.unbind())
            rest += (p.remainder[rank] / size) ** 2
            sizes.append((p, size))
        world = len(self._ranks)
        none = GradientFit(
            coefficients=(0.0,) * world, tolerance=(0.0,) * world, residual=1.0, identified=False
        )
        found = fit_least_squares(rows)
        if found is None or found.apart < LEAST_SINGULAR:
            return none
        moved = sqrt(
            sum(
                sum(step_gamma * abs(w) * n for w, n in zip(found.factors, p.norms, strict=True))
                ** 2
                / size**2
                for p, size in sizes
            )
        )
        total = sqrt(found.size**2 + rest)
        left = sqrt(found.left**2 + rest)
        return GradientFit(
            coefficients=found.factors,
            tolerance=tuple(by * moved for by in found.moved_by),
            residual=left / total if total else 0.0,
            identified=True,
        )

    def _is_right_mean_of_left(self, wrong: list[MeasuredParameter]) -> bool:
        return (
            bool(wrong)
            and not all(self._left_the_shards(m) for m in wrong)
            and all(self._is_mean_of_left(m) for m in wrong)
        )

    def _left_the_shards(self, measured: MeasuredParameter) -> bool:
        """Return True if the recorded local gradients are the shards', so that nothing was wrong
        before synchronization.
        """
        for rank in self._ranks:
            seen = self._view.seen(rank, measured.index)
            own = self._view.local(rank, measured.index)
            if seen is None or own is None or not torch.equal(seen, own):
                return False
        return True

    def _is_mean_of_left(self, measured: MeasuredParameter) -> bool:
        """Return True if all ranks hold the right mean of the recorded local gradients."""
        mean, size = torch.zeros_like(measured.interval.mean), 0.0
        relative = self._gamma_of(self._unit_of(measured))
        factors = self._view.unscaled
        for rank, factor, share in zip(self._ranks, factors, self.shares, strict=True):
            seen = self._view.seen(rank, measured.index)
            if seen is None:
                return False
            seen = as_float64(seen)
            mean += seen * (share / factor)
            size += share / abs(factor) * float(seen.norm())
        return isfinite(size) and all(
            float((y - mean).norm()) <= relative * size for y in map(measured.result, self._ranks)
        )

    def _groups_of_equal_ranks(self) -> tuple[tuple[int, ...], ...]:
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for rank in self._ranks:
            digests = tuple(self._view.digest(rank, i) for i in range(len(self._view.specs)))
            groups.setdefault(digests, []).append(rank)
        return tuple(tuple(ranks) for ranks in groups.values())
