"""Which combinations of the shard gradients a rank's result may be. Pure arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, isclose, sqrt

from distcheck.judge.diagnosis import tokens
from distcheck.judge.diagnosis.measurements import ParameterFacts, StepFacts

_NEARER = 4.0  # Chosen: how much nearer another reading must be to replace the usual one
# Chosen, of their norms: whatever rounds a result, gradients are computed as ever.
_PARALLEL = 1e-5
# Derived: what clip_grad_norm_ adds to a norm before it divides by it.
_CLIP_EPSILONS = (0.0, 1e-6)


@dataclass(frozen=True)
class Reading:
    """One way to read a rank's result.

    kind      `mean` (over samples, times `factor`), `plain mean` (over ranks, times `factor`,
              where shards are unequal), `by samples` and `by positions` (other weights in place
              of tokens, times `factor`), `single` (rank `source`'s gradient alone, times
              `factor`), `counted` (rank r counts `counts[r]` times, and all times `factor`),
              `signed` (the same with counts of 1 and -1), `chain` (each rank's gradient is averaged
              with what was there: 1/2, 1/4, 1/8 and 1/8), `clipped` (every rank's gradient clipped
              to the norm `factor`)
    tolerance  how far rounding may move the factor; 0.0 for one that was tried as it is
    """

    kind: str
    factor: float
    tolerance: float = 0.0
    source: int = -1
    counts: tuple[int, ...] = ()

    def agrees_with(self, other: "Reading") -> bool:
        """Whether two ranks' results have the same reading."""
        same = (self.kind, self.source, self.counts) == (other.kind, other.source, other.counts)
        return same and abs(self.factor - other.factor) <= 2 * (self.tolerance + other.tolerance)


def distance(parameter: ParameterFacts, rank: int, weights: Sequence[float]) -> float:
    """|y - G c| of one parameter."""
    gaps = [
        sum(entry * weight for entry, weight in zip(row, weights, strict=True)) - target
        for row, target in zip(parameter.basis, parameter.projected[rank], strict=True)
    ]
    return hypot(*gaps, parameter.remainder[rank])


def bound(
    step: StepFacts, parameter: ParameterFacts, weights: Sequence[float], slack: float = 0.0
) -> float:
    """How far rounding may take a result from its combination; `slack` is a further share."""
    size = sum(abs(w) * norm for w, norm in zip(weights, parameter.norms, strict=True))
    coarse = zip(weights, parameter.coarse, strict=True) if parameter.coarse else ()
    rounded = ((parameter.gamma or step.gamma) + slack) * size + parameter.floor
    return rounded + sum(abs(w) * c for w, c in coarse)


def holds(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    rank: int,
    weights: Sequence[float],
    slack: float = 0.0,
) -> bool:
    return all(
        distance(parameter, rank, weights) <= bound(step, parameter, weights, slack)
        for parameter in parameters
    )


def readings(step: StepFacts, parameters: Sequence[ParameterFacts], rank: int) -> list[Reading]:
    """Every way in which one rank's result can be read, over all of `parameters` at once."""
    world, shares = len(step.shares), step.shares
    found = _scaled(step, parameters, rank, "mean", shares)
    plain = [1.0 / world] * world
    # Chosen: shares are quotients of whole numbers, off by a few u of float64.
    if not all(isclose(share, plain[0], rel_tol=1e-12) for share in shares):
        found += _scaled(step, parameters, rank, "plain mean", plain)
    for kind, weights in tokens.other_weights(step).items():
        found += _scaled(step, parameters, rank, kind, weights)
    if world > 1:
        for source in range(world):
            alone = [float(r == source) for r in range(world)]
            found += [
                Reading("single", r.factor, r.tolerance, source=source)
                for r in _scaled(step, parameters, rank, "single", alone)
            ]
        if {p.name for p in parameters} == {p.name for p in step.parameters}:
            found += _counted(step, parameters, rank)
            found += _clipped(step, parameters, rank)
    return found


def _scaled(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    rank: int,
    kind: str,
    base: Sequence[float],
) -> list[Reading]:
    """A multiple of `base`: by a factor that has a name, or else by the one that fits best.

    Where all the shards' gradients are multiples of each other, as those of a single element are,
    a result is a multiple of anything, so there a factor must have a name.
    """
    world = len(base)
    named = [1.0, float(world), 1.0 / world, -1.0] if kind != "single" else [1.0, 1.0 / world]
    if kind == "mean":
        named += tokens.named_factors(step)
    found = [
        Reading(kind, factor)
        for factor in dict.fromkeys(named)
        if holds(step, parameters, rank, [factor * b for b in base])
    ]
    if all_parallel(step, parameters):
        return found
    factor, tolerance = best_factor(step, parameters, rank, base)
    whole = kind == "mean" and found == [Reading(kind, 1.0)]
    if found and not (whole and _fits_better(parameters, rank, base, factor)):
        return found
    if abs(factor) <= tolerance:
        return []
    if holds(step, parameters, rank, [factor * b for b in base]):
        return [Reading(kind, factor, tolerance)]
    return []


def _fits_better(
    parameters: Sequence[ParameterFacts], rank: int, base: Sequence[float], factor: float
) -> bool:
    """Whether a result that is wrong in single elements, and as a whole within a coarse bound of
    `base`, is so by a factor: it is four times nearer to that multiple.
    """
    if not all(rank in p.wrong for p in parameters):
        return False
    plain = hypot(*(distance(p, rank, base) for p in parameters))
    scaled = hypot(*(distance(p, rank, [factor * b for b in base]) for p in parameters))
    return scaled < plain / _NEARER


def all_parallel(step: StepFacts, parameters: Sequence[ParameterFacts]) -> bool:
    """Whether the ranks' gradients, of all these parameters at once, are multiples of each other
    up to rounding: then a result is a multiple of any of them, and no weights can be read off it.
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
    """Least squares over the parameters, each counted by its own size: factor and tolerance."""
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


def _counted(step: StepFacts, parameters: Sequence[ParameterFacts], rank: int) -> list[Reading]:
    """Ranks that count a whole number of times, not all alike, and not a single one."""
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
            if holds(step, parameters, rank, [named * c for c in combined]):
                factor, tolerance = named, 0.0
                break
        if holds(step, parameters, rank, [factor * c for c in combined]):
            for kind in _kinds_of(counts, factor, tolerance):
                found.setdefault(kind, Reading(kind, factor, tolerance, counts=counts))
    return list(found.values())


def usual_factors(counts: Sequence[int], shares: Sequence[float]) -> tuple[float, ...]:
    """What counts of ranks are multiplied by where their sum is divided by the number of ranks, of
    those that count, of the counts, or of the samples that count (a rank has a share of them); by
    nothing, last.
    """
    world, total = len(counts), sum(counts)
    divisors = [world, sum(map(bool, counts)), total if total > 0 else world]
    samples = sum(count * share for count, share in zip(counts, shares, strict=True))
    by_samples = [1 / samples] if samples > 0 else []
    return (*dict.fromkeys([*(world / d for d in divisors), *by_samples]), float(world))


def _kinds_of(counts: Sequence[int], factor: float, tolerance: float) -> list[str]:
    """What counts of the ranks, all times a factor, are called; nothing where they have no name."""
    world = len(counts)
    if min(counts) < 0:
        return ["signed"] if set(counts) == {1, -1} else []
    halves = [1, *(2**k for k in range(world - 1))]
    # Chosen: for the roundings of a few float64 operations, where no tolerance is known.
    even = abs(factor * sum(counts) / world - 1) <= world * tolerance + 1e-9
    chain = ["chain"] if sorted(counts) == halves and world > 2 and even else []
    # Of four ranks and more nothing else gives a rank half of the weight, and one a quarter.
    counted = max(counts) <= world and not (chain and world > 3)
    return [*chain, *(["counted"] if counted else [])]


def _clipped(step: StepFacts, parameters: Sequence[ParameterFacts], rank: int) -> list[Reading]:
    """Weights that fall as a rank's norm grows: min(1, most / norm) for one `most`."""
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
            if holds(step, parameters, rank, weights, slack):
                tolerance = most * (slack + max(loose))
                return [Reading("clipped", most, tolerance)]
    return []


def norm_error(step: StepFacts) -> float:
    """How far a norm of all gradients may be off, as a share, and what is divided by it.

    It is computed in the gradients' own dtype. The relative error of a sum of n squares is at most
    lambda sqrt(n) u with a probability of 1 - 2 n exp(-lambda^2 / 2) (Higham and Mary 2019), that
    of its root half of it: 4 sqrt(n) u for lambda = 8; and 4 u for the root and the quotient.
    """
    return step.unit * (4 * sqrt(step.left_elements) + 4)


def norms_differ(step: StepFacts, tolerance: float) -> bool:
    """Whether the ranks' norms are far enough apart to tell clipping from a common factor."""
    return max(step.left_norms) - min(step.left_norms) > tolerance * max(step.left_norms)
