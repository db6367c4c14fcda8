"""Checks the scale of a loss with several terms, by the factors of each term.

If a term is divided by the number of passes, its factors include that number or its inverse. If
only some terms are divided, the others are too large by a factor equal to the number of passes. But
a script may fold the division into the weight of a term (`aux * (0.1 / passes)`). An undivided term
is therefore a mistake if it has no weight or an integer weight. With any other weight, the result
is unknown.

A sum is a mean if it is divided by the number of samples of a pass, or of all passes of the step.
If a divisor differs between steps, but not between the passes of a rank within a step, the script
has determined it for the whole step; it may be a number of tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import ForwardPass, LossFactor, LossTerm, StepRecord

_SAME = 1e-6  # Heuristic: a script's factors are float64 or float32 (2^-24)


@dataclass(frozen=True)
class LossWeight:
    """Total weight of a rank's mean loss over the passes of a step; 1 is correct.

    Instead of a weight, it may have `alone`, the terms that are not divided although `others` are,
    or `why`, the reason why the weight is unknown.
    """

    times: float = 1.0
    alone: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    why: str = ""


def judge_loss_weight(job: JobRecording, rank: int, step: int) -> LossWeight:
    """Judge the terms of a rank's losses in a step with several passes."""
    record = job.records[rank, step]
    passes = [*_as_means(record.trained)]
    why = _why_no_common_terms(passes)
    if why:
        return LossWeight(why=why)
    terms = [_remove_loss_scale(term, record) for term in passes[0].terms]
    numbers = _numbers_of_passes(job, rank)
    if len(terms) == 1 and (known := _judge_sum(job, rank, step, terms[0], numbers)):
        return known
    divisions = [_count_divisions(term.factors, numbers) for term in terms]
    if not any(divisions):
        return _judge_undivided(terms, len(passes))
    if all(divisions):
        return _judge_divided(terms, divisions, numbers, len(passes))
    return _judge_partly(terms, divisions)


def values_without_gradient(job: JobRecording) -> dict[tuple[int, int], float]:
    """Return the part of each loss that has no gradient, by step and rank: what remains of its
    value without the terms that were read from its graph.

    Empty if the value of a term is unknown, and unless the part varies and is at least 1e-4 of the
    loss (chosen: far above the rounding of a sum). A constant is not a term, and a part that
    cancels all terms serves to hide their value.
    """
    found = {}
    for (rank, step), record in job.records.items():
        is_short = bool({*record.dtypes.values(), record.computed} & {"bfloat16", "float16"})
        for one in record.trained if step in job.steps else ():
            is_short = is_short or bool(one.autocast)
            if is_short or not one.terms or any(term.call < 0 for term in one.terms):
                return {}
            values = [term.weight * one.losses[term.call].value for term in one.terms]
            total, rest = sum(values), (one.loss or 0.0) - sum(values)
            if not math.isfinite(rest) or abs(rest) <= 1e-4 * max(map(abs, values)):
                return {}
            if abs(rest + total) <= 1e-4 * abs(total):
                return {}
            found[step, rank] = rest / (record.scale or 1.0)
    low, high = min(found.values(), default=0.0), max(found.values(), default=0.0)
    return found if high - low > 1e-3 * max(abs(low), abs(high)) else {}


def own_divisors(passes: Sequence[ForwardPass]) -> list[float]:
    """Return the divisors of losses that consist of one sum, if each pass has its own divisor, such
    as the number of targets within a mask; otherwise nothing.
    """
    places = _own_factors(passes)
    numbers = [[one.terms[0].factors[n].number for n in places] for one in passes]
    return [1 / math.prod(several) for several in numbers] if places else []


def _own_factors(passes: Sequence[ForwardPass]) -> list[int]:
    """Return the places of those divisors of sums that differ between passes."""
    terms = [one.terms[0] for one in passes if len(one.terms) == 1]
    if len(terms) < len(passes) or {term.reduction for term in terms} != {"sum"}:
        return []
    if len({len(term.factors) for term in terms}) > 1:
        return []
    factors = [*zip(*(term.factors for term in terms), strict=True)]
    places = [place for place, several in enumerate(factors) if len(set(several)) > 1]
    return places if all(one.divides for place in places for one in factors[place]) else []


def _as_means(passes: Sequence[ForwardPass]) -> Iterator[ForwardPass]:
    """Yield passes in which a sum that is divided by a number specific to its pass is replaced by a
    mean.
    """
    places, replace = _own_factors(passes), msgspec.structs.replace
    for one in passes:
        if places:
            factors = [f for n, f in enumerate(one.terms[0].factors) if n not in places]
            term = replace(one.terms[0], reduction="mean", factors=tuple(factors))
            one = replace(one, terms=(term,))
        yield one


def may_be_intended_weight(job: JobRecording, rank: int, step: int, number: float) -> bool:
    """Return True if a loss may intentionally have this total weight: in every pass it is one term,
    multiplied by this number as a weight.
    """
    record = job.records[rank, step]
    passes = record.trained
    if _why_no_common_terms(passes) or len(passes[0].terms) != 1:
        return False
    return any(
        not factor.divides and abs(abs(factor.number) - number) <= _SAME * number
        for factor in _remove_loss_scale(passes[0].terms[0], record).factors
    )


def _why_no_common_terms(passes: Sequence[ForwardPass]) -> str:
    """Return why the passes of a step have no common terms, or ""."""
    if not passes:
        return "no backward pass was recorded"
    for one in passes:
        if not one.terms:
            return f"it is not a sum of weighted losses ({one.unread or 'none was recorded'})"
    if any(one.terms != passes[0].terms for one in passes[1:]):
        return "the weights of its terms change from one backward pass to the next"
    return ""


def _remove_loss_scale(term: LossTerm, record: StepRecord) -> LossTerm:
    scale = [factor for factor in term.factors if factor.number == record.scale][:1]
    rest = [factor for factor in term.factors if not scale or factor is not scale[0]]
    return LossTerm(name=term.name, reduction=term.reduction, call=term.call, factors=tuple(rest))


def _numbers_of_passes(job: JobRecording, rank: int) -> set[int]:
    """Return the numbers of backward passes per step; the last step of an epoch may have fewer."""
    counts = {len(record.trained) for (other, _), record in job.records.items() if other == rank}
    return {count for count in counts if count > 1}


def _count_divisions(factors: Sequence[LossFactor], numbers: set[int]) -> int:
    return sum(
        any(abs(abs(factor.number) * number - 1) <= _SAME for number in numbers)
        for factor in factors
    )


def _has_weight_one(terms: Sequence[LossTerm], times: float) -> bool:
    """Return True if a mean among the terms, or all terms together, have weight 1 / `times`."""
    means = [times * term.weight for term in terms if term.reduction == "mean"]
    together = len(means) == len(terms) and abs(sum(means) - 1) <= _SAME
    return together or any(abs(abs(weight) - 1) <= _SAME for weight in means)


def _judge_sum(
    job: JobRecording, rank: int, step: int, term: LossTerm, numbers: set[int]
) -> LossWeight | None:
    """Judge a loss that is one sum; return None if its divisor is unknown."""
    passes, divisions = job.records[rank, step].trained, _count_divisions(term.factors, numbers)
    if term.reduction != "sum" or not term.weight:
        return None
    if any(_is_determined_by_step(job, rank, n) for n in range(len(term.factors))):
        several = "it is divided by a number of the whole step, and by the number of passes"
        return LossWeight(why=several) if divisions else LossWeight()
    rows = {len(one.rows) for one in passes}
    if len(rows) != 1 or not (each := rows.pop()):
        return None
    divisors = [1 / abs(n) for n in (term.weight, *(f.number for f in term.factors))]
    of_step = (each * len(passes), each * len(passes) * job.world)
    is_pass = abs(divisors[0] - each) <= _SAME * each
    is_step = any(abs(one - n) <= _SAME * n for n in of_step for one in divisors)
    if is_pass and divisions:
        both = (
            "it is divided by the number of samples of a pass, which is also the number of passes"
        )
        return LossWeight(why=both)
    return LossWeight(times=float(len(passes))) if is_pass else LossWeight() if is_step else None


def _is_determined_by_step(job: JobRecording, rank: int, number: int) -> bool:
    """Return True if the only term of a rank is divided by a factor that differs between steps, but
    not between the passes of one step. `number` is the place of the factor.
    """
    found = []
    for step in job.steps:
        passes = job.records[rank, step].trained
        if any(len(p.terms) != 1 or len(p.terms[0].factors) <= number for p in passes):
            return False
        found.append({p.terms[0].factors[number] for p in passes})
    several = all(len(factors) == 1 and next(iter(factors)).divides for factors in found)
    return several and len({factor for factors in found for factor in factors}) > 1


def _judge_undivided(terms: Sequence[LossTerm], passes: int) -> LossWeight:
    if _has_weight_one(terms, 1.0):
        return LossWeight(times=float(passes))
    return LossWeight(
        why="none of its terms is divided by the number of backward passes or has the weight 1"
    )


def _judge_divided(
    terms: Sequence[LossTerm], divisions: Sequence[int], numbers: set[int], passes: int
) -> LossWeight:
    if min(divisions) < 2 or any(_has_weight_one(terms, float(number)) for number in numbers):
        return LossWeight()
    outer = [factor for factor in terms[0].factors if factor.outer]
    if _count_divisions(outer, numbers) > 1:
        return LossWeight(times=1 / passes)
    return LossWeight(
        why="each of its terms is divided by the number of backward passes twice, or has a weight "
        "of that value"
    )


def _judge_partly(terms: Sequence[LossTerm], divisions: Sequence[int]) -> LossWeight:
    """Judge a loss with some terms divided by the number of passes."""
    alone = [term for term, count in zip(terms, divisions, strict=True) if not count]
    others = tuple(term.name for term, count in zip(terms, divisions, strict=True) if count)
    certain = [
        term.name
        for term in alone
        if term.reduction == "mean" and not any(factor.computed for factor in term.factors)
    ]
    if certain:
        return LossWeight(alone=tuple(certain), others=others)
    numbers = [factor.number for factor in alone[0].factors if factor.computed]
    weight = f" in its weight {numbers[0]:.6g}" if numbers else ""
    return LossWeight(
        why=f"its term {others[0]} is divided by the number of backward passes, but "
        f"{alone[0].name} is not, unless the division is{weight or ' within the term'}; divide "
        "the sum of the terms to check the scale"
    )
