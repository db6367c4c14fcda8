"""Causes with wrong rank weights: scale, dropped and duplicated ranks, sign, clipping."""

from collections.abc import Sequence
from functools import partial
from math import hypot, isclose

from distcheck.judge.diagnosis import tokens
from distcheck.judge.diagnosis.combinations import (
    Reading,
    fitting_readings,
    norm_error,
    norms_differ,
    usual_factors,
)
from distcheck.judge.diagnosis.measurements import ParameterFacts, StepFacts
from distcheck.judge.diagnosis.wording import number_text, parameters_text, positions_text
from distcheck.records import Diagnosis
from distcheck.records.causes import name_cause


def cause_of_negative_weights(step: StepFacts, way: Reading, where: str) -> Diagnosis:
    minus = [rank for rank, count in enumerate(way.counts) if count * way.factor < 0]
    return name_cause(
        "wrong-sign",
        f"{where}: the contribution of {positions_text(step, minus)} is negated on every rank (all "
        f"times {number_text(abs(way.factor))})",
    )


def cause_of_chained_averages(way: Reading, where: str) -> Diagnosis:
    """Name a chain of averages: each rank is averaged with the result so far."""
    total = sum(way.counts)
    shown = ", ".join(f"{count}/{total}" for count in way.counts)
    return name_cause(
        "chained-mean",
        f"{where}: every rank holds the ranks' gradients with weights {shown}, as if each were "
        "averaged with the running average, (a + b) / 2",
    )


def causes_of_smaller_weights(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    """Name a minority of ranks with a fraction of the usual weight, if no rank was added twice."""
    most = max(way.counts)
    fewer = [rank for rank, count in enumerate(way.counts) if count < most]
    if 0 in way.counts or 2 * len(fewer) >= len(way.counts):
        return []
    # Heuristic: far above float32 rounding, far below one rank in a thousand.
    if not isclose(way.factor * most, 1.0, rel_tol=1e-4):
        return []
    counts = ", ".join(number_text(count / most) for count in way.counts)
    return [
        name_cause(
            "wrong-divisor",
            f"{where}: ranks have relative weights {counts} on every rank; the input of the "
            f"all-reduce on {positions_text(step, fewer)} had a different scale than on the others",
            "some-ranks",
        )
    ]


def causes_of_extra_factor(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    """Name a second mistake in addition to integer weights: a factor that follows neither from the
    world size, nor from the number of ranks with weight, nor from the weights.
    """
    world, factor = len(step.shares), way.factor
    *usual, undivided = usual_factors(way.counts, step.shares)
    if factor in usual:
        return []
    evidence = f"{where}: this sum is also multiplied by {number_text(factor)}"
    if factor == undivided:
        evidence += ": the sum is not divided"
        return [name_cause("missing-division", evidence, "once", world=world)]
    return [name_cause("wrong-divisor", evidence, "further")]


def cause_of_equal_weights(step: StepFacts, where: str) -> Diagnosis:
    """Name the missing weights of uneven shards."""
    shares = ", ".join(number_text(share) for share in step.shares)
    evidence = f"{where}: all ranks are weighted equally; weights by number of samples are {shares}"
    return name_cause("unweighted-mean", evidence)


def cause_of_dropped_ranks(
    step: StepFacts, positions: Sequence[int], evidence: str, *, mean: bool
) -> Diagnosis:
    """Name ranks with weight 0. `mean` is True if the result is the right mean over the remaining
    ranks, as with a server that has no data by design.
    """
    others = len(step.shares) - 1
    may_serve = len(positions) == 1 and mean and step.undeclared and others > 0
    return name_cause(
        "dropped-rank",
        evidence,
        "usual",
        *["server"] * may_serve,
        ranks=positions_text(step, positions),
        number=step.number(positions[0]) if may_serve else "",
        others=others,
    )


def cause_of_integer_weights(step: StepFacts, way: Reading, where: str) -> Diagnosis:
    """Name integer rank weights: 0 for some, or more than 1."""
    counts = ", ".join(map(str, way.counts))
    absent = [rank for rank, count in enumerate(way.counts) if count == 0]
    evidence = (
        f"{where}: ranks have weights {counts} on every rank (all times {number_text(way.factor)})"
    )
    if max(way.counts) > 1:
        if absent:
            evidence += f", 0 on {positions_text(step, absent)}"
        return name_cause("duplicated-rank", evidence)
    required = len(way.counts) / (len(way.counts) - len(absent)) if absent else 1.0
    # Heuristic: far above float32 rounding, far below one rank in a thousand.
    mean = isclose(way.factor, required, rel_tol=1e-4)
    return cause_of_dropped_ranks(step, absent, evidence, mean=mean)


def explain(step: StepFacts, parameters: Sequence[ParameterFacts]) -> list[Diagnosis]:
    """Return every cause that explains these parameters on all ranks."""
    ways = [fitting_readings(step, parameters, rank) for rank in range(len(step.shares))]
    where = f"step {step.step}, {parameters_text(step, parameters)}"
    found: list[Diagnosis] = []
    if not all(ways):
        return _one_right(step, parameters, ways, where)
    for way in ways[0]:
        if all(any(way.agrees_with(other) for other in others) for others in ways[1:]):
            found += _common_cause(step, way, where)
    own = all(any(w.source == rank for w in way) for rank, way in enumerate(ways))
    if own and len(parameters) == step.total and len(ways) > 1:
        found.append(_no_sync(ways, where))
    if not found:
        found += _one_right(step, parameters, ways, where) or _mixed_causes(step, ways, where)
    return found


def _common_cause(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    """Name a combination that all ranks hold."""
    if way.kind == "mean":
        return [] if way.factor == 1.0 else _scales(step, way, where)
    if way.kind == "by positions" and way.factor == 1.0:
        return [tokens.cause_of_counted_padding(step, where)]
    if way.kind in ("plain mean", "by samples") and step.tokens:
        unweighted = tokens.cause_of_wrong_token_weights(step, way.kind, where)
        return [unweighted] if way.factor == 1.0 else _larger_first(step, way, unweighted, where)
    if way.kind == "plain mean":
        unweighted = cause_of_equal_weights(step, where)
        return [unweighted] if way.factor == 1.0 else _larger_first(step, way, unweighted, where)
    if way.kind == "single":
        return _single_cause(step, way, where)
    if way.kind == "counted":
        if less := causes_of_smaller_weights(step, way, where):
            return less
        return [
            cause_of_integer_weights(step, way, where),
            *causes_of_extra_factor(step, way, where),
        ]
    if way.kind == "signed":
        return [cause_of_negative_weights(step, way, where)]
    if way.kind in ("by samples", "by positions"):
        return []  # times a factor: two mistakes, neither of which is certain
    if way.kind == "chain":
        return [cause_of_chained_averages(way, where)]
    return _clip_cause(step, way, where)


def _scales(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    general = _scale(step, way, where)
    evidence = f"{where}: every rank holds {number_text(way.factor)} times the mean over all tokens"
    found = tokens.causes_of_token_factor(step, way.factor, evidence)
    by_ranks = way.factor in (-1.0, len(step.shares), 1 / len(step.shares))
    return [*found, general] if by_ranks or not found else found


def _scale(step: StepFacts, way: Reading, where: str) -> Diagnosis:
    world, factor = len(step.shares), way.factor
    mean = "mean over all samples" if way.kind == "mean" else "plain mean over the ranks"
    evidence = f"{where}: every rank holds {number_text(factor)} times the {mean}"
    evidence += _already_there(step, factor)
    if factor == -1.0:
        return name_cause("wrong-sign", evidence)
    if accumulated := _by_micro_batches(step, factor):
        return name_cause("accumulation-scale", f"{evidence}; {accumulated}")
    if factor == world:
        return name_cause("missing-division", evidence, "once", "twice", world=world)
    if factor == 1 / world:
        return name_cause("double-division", evidence)
    divisor = world / factor
    shown = number_text(divisor, beside=(world,))
    evidence += f", as if the sum were divided by {shown} and not by {world}"
    norm = _round_norm(step, way)
    if norm:
        evidence += f"; the total norm is {norm}, as after clipping to that norm"
    clipped = ["clipped"] if norm else []
    return name_cause("wrong-divisor", evidence, "usual", *clipped, world=world, norm=norm)


def _by_micro_batches(step: StepFacts, factor: float) -> str:
    """Explain a factor by the number of micro-batches, if it may not be the world size, else ""."""
    world = len(step.shares)
    # Heuristic: far above float32 rounding, and no other factor is this close.
    near = partial(isclose, factor, rel_tol=1e-4)
    count = next((n for n in step.micro_batches if near(n) or near(1 / n)), 0)
    if not count:
        return ""
    before = [f is not None and near(f) for f in step.left_factors]
    if not all(before) and factor in (world, 1 / world):
        return ""
    if near(count):
        return (
            f"that is the number of micro-batches, whose mean losses ({count} of them in each "
            "shard) were added up without being divided"
        )
    share = f"their share ({count} of them)"
    return f"that is 1 over the number of micro-batches: {share} is applied twice"


def _round_norm(step: StepFacts, way: Reading) -> str:
    """Return the L2 norm of the result if it is below the mean's and has one digit, like a typical
    clipping norm. The relative tolerance is 1e-4, since torch adds 1e-6 to the norm that it divides
    by, and computes it in the gradients' dtype.
    """
    if len(step.parameters) != step.total or not 0 < way.factor < 1:
        return ""
    norm = hypot(*(hypot(*p.projected[0], p.remainder[0]) for p in step.parameters))
    rounded = f"{norm:.0e}"
    # Heuristic: one norm in a thousand has one digit by chance.
    return f"{float(rounded):g}" if isclose(norm, float(rounded), rel_tol=1e-4) else ""


def _already_there(step: StepFacts, factor: float) -> str:
    """Report if the factor was present before synchronization, or if that is unknown."""
    seen = step.left_factors
    if any(f is None for f in seen):
        return " (a loss scaled by the same factor would look the same)"
    if all(f == 1.0 for f in seen):
        return "; gradients were correct after backward, so synchronization introduced the factor"
    # Heuristic: far above float32 rounding, and no other factor is this close.
    if all(f is not None and isclose(f, factor, rel_tol=1e-4) for f in seen):
        return "; gradients were wrong by the same factor after backward"
    return ""


def _single_cause(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    """Name one rank's local gradient on every rank. With two ranks several causes fit."""
    world = len(step.shares)
    times = "" if way.factor == 1.0 else f" times {number_text(way.factor)}"
    source = positions_text(step, [way.source])
    evidence = f"{where}: every rank holds {source}'s local gradient{times}"
    found = [name_cause("single-rank-gradient", evidence)]
    if world != 2:
        return found
    return [
        *found,
        cause_of_dropped_ranks(step, [1 - way.source], evidence, mean=way.factor == 1.0),
        name_cause("duplicated-rank", evidence),
    ]


def _clip_cause(step: StepFacts, way: Reading, where: str) -> list[Diagnosis]:
    if not norms_differ(step, way.tolerance / way.factor):
        return []  # a factor common to all ranks has its own name
    norms = ", ".join(f"{norm:.4g}" for norm in step.left_norms)
    return [
        name_cause(
            "clip-before-sync",
            f"{where}: the weight of each rank's gradient decreases with its norm ({norms}), as if "
            f"it were clipped to {way.factor:.4g} before averaging",
        )
    ]


def _no_sync(ways: Sequence[Sequence[Reading]], where: str) -> Diagnosis:
    own = [next(w for w in way if w.source == rank) for rank, way in enumerate(ways)]
    factors = {number_text(way.factor) for way in own}
    times = "" if factors == {"1"} else f" times {', '.join(sorted(factors))}"
    return name_cause("missing-sync", f"{where}: every rank holds its local gradient{times}")


def _is_right(ways: Sequence[Reading]) -> bool:
    return any(way.kind == "mean" and way.factor == 1.0 for way in ways)


def _one_right(
    step: StepFacts,
    parameters: Sequence[ParameterFacts],
    ways: Sequence[Sequence[Reading]],
    where: str,
) -> list[Diagnosis]:
    """Name a mean or sum on one rank only, if no other rank has a multiple of it. At least a tenth
    of their elements must differ, to exclude damaged or accidentally right elements.
    """
    right = [rank for rank, way in enumerate(ways) if _is_right(way)]
    summed = [
        rank
        for rank, way in enumerate(ways)
        if any(one.kind == "mean" and one.factor == len(ways) for one in way)
    ]
    right = right or summed
    others = [way for rank, way in enumerate(ways) if rank not in right]
    if (
        len(right) != 1
        or not others
        or any(w.kind in ("mean", "plain mean") for way in others for w in way)
    ):
        return []
    elements = sum(p.elements for p in parameters)
    off = [
        elements - sum(p.of_mean[rank] for p in parameters)
        for rank in range(len(ways))
        if rank not in right
    ]
    if min(off) <= max(1, elements // 10):
        return []
    alone = f"{where}: only {positions_text(step, right)} holds"
    own = [r for r, way in enumerate(ways) if r not in right and any(w.source == r for w in way)]
    holding_own = f", and {positions_text(step, own)} the local gradient" if own else ""
    if right != summed:
        mean = f"{alone} the mean over all samples{holding_own}"
        return [name_cause("single-rank-gradient", mean, "usual", "owners")]
    summed_up = f"{alone} the sum over all ranks"
    return [
        name_cause("single-rank-gradient", f"{summed_up}{holding_own}"),
        name_cause("missing-division", f"{summed_up}, not divided", "once", world=len(ways)),
    ]


def _mixed_causes(
    step: StepFacts, ways: Sequence[Sequence[Reading]], where: str
) -> list[Diagnosis]:
    """Name each of the different results that ranks hold."""
    if all(map(_is_right, ways)):
        return []  # according to norms; single elements differ more
    scaled = [next((w for w in way if w.kind == "mean"), None) for way in ways]
    if all(way is not None for way in scaled):
        return _differing_factors(step, [way for way in scaled if way is not None], where)
    alone = [
        rank
        for rank, way in enumerate(ways)
        if not _is_right(way) and any(w.source == rank for w in way)
    ]
    rest = [way for rank, way in enumerate(ways) if rank not in alone]
    if not alone:
        return _integer_weights(step, ways, where)
    if not rest:
        return []
    left = f"{where}: {positions_text(step, alone)} held only the local gradient"
    found = [name_cause("missing-sync", left)]
    of_rest = next((way for way in rest[0] if way.kind == "counted"), None)
    if of_rest is not None:
        return [*found, cause_of_integer_weights(step, of_rest, f"{where}, on the other ranks")]
    return found if all(map(_is_right, rest)) else []


def _integer_weights(
    step: StepFacts, ways: Sequence[Sequence[Reading]], where: str
) -> list[Diagnosis]:
    chosen = [next((w for w in way if w.kind in ("counted", "single")), None) for way in ways]
    counts: dict[tuple[int, ...], list[int]] = {}
    for rank, (way, found) in enumerate(zip(ways, chosen, strict=True)):
        if _is_right(way):
            counted = (1,) * len(ways)
        elif found is None:
            return []
        elif found.kind == "single":
            counted = tuple(int(r == found.source) for r in range(len(ways)))
        else:
            counted = found.counts
        counts.setdefault(counted, []).append(rank)
    shown = "; ".join(
        f"on {positions_text(step, r)} {', '.join(map(str, c))}" for c, r in counts.items()
    )
    evidence = f"{where}: the weights of ranks are unequal and differ from rank to rank: {shown}"
    if max(max(counted) for counted in counts) > 1:
        return [name_cause("duplicated-rank", evidence)]
    return [name_cause("dropped-rank", evidence, "groups")]


def _differing_factors(step: StepFacts, scaled: Sequence[Reading], where: str) -> list[Diagnosis]:
    """Name the mean times a factor that differs from rank to rank."""
    factors = [way.factor for way in scaled]
    shown = ", ".join(number_text(factor) for factor in factors)
    # Derived: clip_grad_norm_ adds 1e-6 to the norm that it divides by.
    products = [f * (n + 1e-6) for f, n in zip(factors, step.left_norms, strict=True)]
    relative = max(way.tolerance / abs(way.factor) for way in scaled)
    relative += norm_error(step)
    spread = (max(products) - min(products)) / max(map(abs, products))
    evidence = f"{where}: ranks hold the mean over all samples times {shown}"
    if spread <= 2 * relative and norms_differ(step, 4 * relative):
        return [
            name_cause(
                "clip-before-sync",
                f"{evidence}, which is {products[0]:.4g} over the norm of each rank's local "
                "gradient: the norm was computed before the sync",
            )
        ]
    world = len(step.shares)
    for cause, named in (("missing-division", float(world)), ("double-division", 1 / world)):
        if set(factors) == {1.0, named}:
            some = [rank for rank, factor in enumerate(factors) if factor == named]
            evidence += f": the factor of {positions_text(step, some)} differs"
            return [name_cause(cause, evidence, "on-every-rank")]
    return [name_cause("wrong-divisor", evidence, "by-rank")]


def _larger_first(
    step: StepFacts, way: Reading, unweighted: Diagnosis, where: str
) -> list[Diagnosis]:
    """Order the two mistakes of a plain mean times a factor by their distance from the expected
    weights: the sum over ranks of |1/W - s_r|, and |factor - 1|.
    """
    world = len(step.shares)
    apart = sum(abs(1.0 / world - share) for share in step.shares)
    scale = _scale(step, way, where)
    return [scale, unweighted] if abs(way.factor - 1.0) > apart else [unweighted, scale]
