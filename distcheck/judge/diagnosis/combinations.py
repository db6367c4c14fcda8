"""Expresses a rank's result as a combination of shard gradients. Pure arithmetic on facts.

Purpose: a synchronization is linear, so a wrong result y of a rank is usually a combination of the
shard gradients g_r with weights that differ from the mean's. Each `Reading` is one hypothesis about
the weights: the mean times a factor, one rank's gradient, ranks with integer weights or sign flips,
a chain of pairwise averages, or clipping before the sum. `readings` returns all that fit; the
causes (`weights`, `precision`, ...) choose among them.

Method: `facts` holds R and Q^T y of the factorization G = Q R, so the distance |y - G c| of any
weights c costs a few multiplications (`distance`). A hypothesis fits if the distance is within
`bound`, the rounding of a weighted sum in any order: gamma(W + 5) * sum |c_r| |g_r| + floor.
Weights come from named candidates first (1, W, 1 / W, -1), then from least squares over all
parameters (`best_factor`), each parameter scaled by its size.

Invariants: a reading must fit every parameter in `parameters` at once. If all shard gradients are
multiples of each other (`all_parallel`), every result is a multiple of any of them, so only named
factors are accepted. A fitted factor carries its `tolerance`, and readings of two ranks agree if
their factors do within both. Integer and clipping weights are derived from `step.fits`, and only if
the least-squares system identifies them (`identified`).

Example with W = 2, shares 0.5, 0.5 and shard gradients g_0 = (4, 0), g_1 = (0, 2): the mean is (2,
1).
- y = (4, 2) on both ranks: the mean has distance |(2, 1)| = 2.24, far above rounding, but factor 2
  = W fits exactly: Reading("mean", 2), the sum without a division.
- y = (4, 0) on rank 0: no multiple of the mean fits, weights (1, 0) do: Reading("single", 1,
  source=0), its local gradient. If rank 1 holds (0, 2), it reads as source=1: no synchronization.
- y = (2, -1) on both ranks: least squares yields (0.5, -0.5), the shares times (1, -1):
  Reading("signed", 1, counts=(1, -1)), a flipped sign of rank 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, isclose, sqrt

from distcheck.judge.diagnosis import tokens
from distcheck.judge.diagnosis.measurements import ParameterFacts, StepFacts

_NEARER = 4.0  # Heuristic: distance ratio at which another reading replaces the usual one
# Heuristic, relative to their norms: gradients are computed with the usual rounding, however a
# result is rounded.
_PARALLEL = 1e-5
# Derived: clip_grad_norm_ adds this to a norm before it divides by it.
_CLIP_EPSILONS = (0.0, 1e-6)


@dataclass(frozen=True)
class Reading:
    """One interpretation of a rank's result.

    kind       `mean`         mean over samples, times `factor`
               `plain mean`   mean over ranks, times `factor`, if shards are uneven
               `by samples`, `by positions`   mean with these weights, times `factor`
               `single`       only the gradient of rank `source`, times `factor`
               `counted`      rank r has weight `counts[r]`, all times `factor`
               `signed`       like `counted`, with 1 and -1
               `chain`        each rank's gradient is averaged with the previous result: weights
                              1/2, 1/4, 1/8 and 1/8
               `clipped`      every rank's gradient is clipped to norm `factor`
    tolerance  the factor's rounding error; 0.0 for a named factor
    """

    kind: str
    factor: float
    tolerance: float = 0.0
    source: int = -1
    counts: tuple[int, ...] = ()

    def agrees_with(self, other: "Reading") -> bool:
        """Return True if the results of two ranks have the same reading."""
        same = (self.kind, self.source, self.counts) == (other.kind, other.source, other.counts)
        return same and abs(self.factor - other.factor) <= 2 * (self.tolerance + other.tolerance)


def combination_distance(parameter: ParameterFacts, rank: int, weights: Sequence[float]) -> float:
    """Return |y - G c| of one parameter."""
    gaps = [
        sum(entry * weight for entry, weight in zip(row, weights, strict=True)) - target
        for row, target in zip(parameter.basis, parameter.projected[rank], strict=True)
    ]
    return hypot(*gaps, parameter.remainder[rank])


def combination_bound(
    step: StepFacts, parameter: ParameterFacts, weights: Sequence[float], slack: float = 0.0
) -> float:
    """Return the rounding bound of a combination; `slack` is an additional relative error."""
    size = sum(abs(w) * norm for w, norm in zip(weights, parameter.norms, strict=True))
    coarse = zip(weights, parameter.coarse, strict=True) if parameter.coarse else ()
    rounded = ((parameter.gamma or step.gamma) + slack) * size + parameter.floor
    return rounded + sum(abs(w) * c for w, c in coarse)


def fits_combination(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    rank: int,
    weights: Sequence[float],
    slack: float = 0.0,
) -> bool:
    return all(
        combination_distance(parameter, rank, weights)
        <= combination_bound(step, parameter, weights, slack)
        for parameter in parameters
    )


def fitting_readings(
    step: StepFacts, parameters: Sequence[ParameterFacts], rank: int
) -> list[Reading]:
    """Return every reading of one rank's result that fits all of `parameters` at once."""
    world, shares = len(step.shares), step.shares
    found = _multiples(step, parameters, rank, "mean", shares)
    plain = [1.0 / world] * world
    # Heuristic: shares are quotients of integers, off by a few u of float64.
    if not all(isclose(share, plain[0], rel_tol=1e-12) for share in shares):
        found += _multiples(step, parameters, rank, "plain mean", plain)
    for kind, weights in tokens.mistaken_weights(step).items():
        found += _multiples(step, parameters, rank, kind, weights)
    if world > 1:
        for source in range(world):
            alone = [float(r == source) for r in range(world)]
            found += [
                Reading("single", r.factor, r.tolerance, source=source)
                for r in _multiples(step, parameters, rank, "single", alone)
            ]
        if {p.name for p in parameters} == {p.name for p in step.parameters}:
            found += _integer_weights(step, parameters, rank)
            found += _clip_weights(step, parameters, rank)
    return found


def _multiples(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    rank: int,
    kind: str,
    base: Sequence[float],
) -> list[Reading]:
    """Return multiples of `base` that fit: by a named factor, else by the least-squares factor.

    If all shard gradients are multiples of each other, such as those of a single element, any
    result is a multiple of any of them, so only named factors are accepted.
    """
    world = len(base)
    named = [1.0, float(world), 1.0 / world, -1.0] if kind != "single" else [1.0, 1.0 / world]
    if kind == "mean":
        named += tokens.token_factors(step)
    found = [
        Reading(kind, factor)
        for factor in dict.fromkeys(named)
        if fits_combination(step, parameters, rank, [factor * b for b in base])
    ]
    if all_parallel(step, parameters):
        return found
    factor, tolerance = best_factor(step, parameters, rank, base)
    whole = kind == "mean" and found == [Reading(kind, 1.0)]
    if found and not (whole and _fits_better(parameters, rank, base, factor)):
        return found
    if abs(factor) <= tolerance:
        return []
    if fits_combination(step, parameters, rank, [factor * b for b in base]):
        return [Reading(kind, factor, tolerance)]
    return []


def _fits_better(
    parameters: Sequence[ParameterFacts], rank: int, base: Sequence[float], factor: float
) -> bool:
    """Return True if a result with wrong elements, though within a coarse bound of `base`, is four
    times nearer to its multiple.
    """
    if not all(rank in p.wrong for p in parameters):
        return False
    plain = hypot(*(combination_distance(p, rank, base) for p in parameters))
    scaled = hypot(*(combination_distance(p, rank, [factor * b for b in base]) for p in parameters))
    return scaled < plain / _NEARER


def all_parallel(step: StepFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Return True if the ranks' gradients, over all these parameters, are multiples of each other
    up to rounding. Weights cannot be identified in this case.
    """
    world = len(step.shares)
    columns = [[row[r] for p in parameters for row in p.basis] for r in range(world)]
    norms = [hypot(*column) for column in columns]
    longest = max(range(world), key=norms.__getitem__)
    if not norms[longest]:
        return True
    direction = [entry / norms[longest] for entry in columns[longest]]
    for column, norm in zip(columns, norms, strict=True):
        along = sum(a * b for a, b in zip(column, direction, strict=True))
        aside = hypot(*(a - along * b for a, b in zip(column, direction, strict=True)))
        if aside > min(4 * step.gamma, _PARALLEL) * norm:
            return False
    return world > 1


def best_factor(
    step: StepFacts, parameters: Sequence[ParameterFacts], rank: int, base: Sequence[float]
) -> tuple[float, float]:
    """Return the least-squares factor and its tolerance. Parameters are scaled by their sizes."""
    along = square = allowed = 0.0
    for parameter in parameters:
        size = sum(abs(b) * norm for b, norm in zip(base, parameter.norms, strict=True))
        if size == 0:
            continue
        image = [
            sum(entry * b for entry, b in zip(row, base, strict=True)) for row in parameter.basis
        ]
        targets = parameter.projected[rank]
        along += sum(i * t for i, t in zip(image, targets, strict=True)) / size**2
        square += sum(i * i for i in image) / size**2
        allowed += 1
    if square == 0:
        return 0.0, 0.0
    factor = along / square
    return factor, step.gamma * max(1.0, abs(factor)) * sqrt(allowed / square)


def _integer_weights(
    step: StepFacts, parameters: Sequence[ParameterFacts], rank: int
) -> list[Reading]:
    """Return readings with integer weights of ranks, neither all equal nor of a single rank."""
    fit, world = step.fits[rank], len(step.shares)
    if not fit.identified:
        return []
    found: dict[str, Reading] = {}
    for base in {step.shares, (1.0 / world,) * world}:
        ratios = [c / b for c, b in zip(fit.coefficients, base, strict=True)]
        largest = max(map(abs, ratios))
        units = [abs(r) for r in ratios if abs(r) > largest / max(2 * world, 2**world)]
        if not units:
            continue
        smallest = min(units)
        counts = tuple(round(r / smallest) for r in ratios)
        if len(set(counts)) == 1 or sum(map(bool, counts)) < 2:
            continue
        combined = [count * b for count, b in zip(counts, base, strict=True)]
        factor, tolerance = best_factor(step, parameters, rank, combined)
        for named in usual_factors(counts, step.shares):
            if fits_combination(step, parameters, rank, [named * c for c in combined]):
                factor, tolerance = named, 0.0
                break
        if fits_combination(step, parameters, rank, [factor * c for c in combined]):
            for kind in _kinds_of(counts, factor, tolerance):
                found.setdefault(kind, Reading(kind, factor, tolerance, counts=counts))
    return list(found.values())


def usual_factors(counts: Sequence[int], shares: Sequence[float]) -> tuple[float, ...]:
    """Return the usual factors for integer weights: the weighted sum divided by the world size, the
    number of ranks with weight, the sum of weights, or the weighted samples, or not divided.
    """
    world, total = len(counts), sum(counts)
    divisors = [world, sum(map(bool, counts)), total if total > 0 else world]
    samples = sum(count * share for count, share in zip(counts, shares, strict=True))
    by_samples = [1 / samples] if samples > 0 else []
    return (*dict.fromkeys([*(world / d for d in divisors), *by_samples]), float(world))


def _kinds_of(counts: Sequence[int], factor: float, tolerance: float) -> list[str]:
    """Return the names of integer weights times a factor; empty if they have none."""
    world = len(counts)
    if min(counts) < 0:
        return ["signed"] if set(counts) == {1, -1} else []
    halves = [1, *(2**k for k in range(world - 1))]
    # Heuristic: for the roundings of a few float64 operations, if no tolerance is known.
    even = abs(factor * sum(counts) / world - 1) <= world * tolerance + 1e-9
    chain = ["chain"] if sorted(counts) == halves and world > 2 and even else []
    # With four ranks or more, nothing else gives weights 1/2 and 1/4.
    counted = max(counts) <= world and not (chain and world > 3)
    return [*chain, *(["counted"] if counted else [])]


def _clip_weights(
    step: StepFacts, parameters: Sequence[ParameterFacts], rank: int
) -> list[Reading]:
    """Return weights that decrease with a rank's norm: min(1, most / norm) for one `most`."""
    fit, norms = step.fits[rank], step.left_norms
    if not fit.identified or not all(norms):
        return []
    slack = norm_error(step)
    for base in {step.shares, (1.0 / len(norms),) * len(norms)}:
        ratios = [c / b for c, b in zip(fit.coefficients, base, strict=True)]
        loose = [t / b + slack for t, b in zip(fit.tolerance, base, strict=True)]
        clipped = [r for r, ratio in enumerate(ratios) if 0 < ratio < 1 - loose[r]]
        for epsilon in _CLIP_EPSILONS:
            if not clipped:
                continue
            most = sum(ratios[r] * (norms[r] + epsilon) for r in clipped) / len(clipped)
            shrunk = [min(1.0, most / (norm + epsilon)) for norm in norms]
            weights = [b * k for b, k in zip(base, shrunk, strict=True)]
            if fits_combination(step, parameters, rank, weights, slack):
                tolerance = most * (slack + max(loose))
                return [Reading("clipped", most, tolerance)]
    return []


def norm_error(step: StepFacts) -> float:
    """Return the relative error of a total gradient norm and of dividing by it.

    It is computed in the gradients' dtype. The relative error of a sum of n squares is at most
    lambda sqrt(n) u with a probability of 1 - 2 n exp(-lambda^2 / 2) (Higham and Mary 2019), and
    that of its root half as large: 4 sqrt(n) u for lambda = 8. Root and quotient add 4 u.
    """
    return step.unit * (4 * sqrt(step.left_elements) + 4)


def norms_differ(step: StepFacts, tolerance: float) -> bool:
    """Return True if the ranks' norms differ enough to distinguish clipping from a factor."""
    return max(step.left_norms) - min(step.left_norms) > tolerance * max(step.left_norms)
