"""The scale of a loss that adds several terms up, by the numbers that each was multiplied by.

A term that is divided by the number of passes has that number, or one over it, among its factors.
One that is not, beside one that is, counts as often as there are passes. But a script may have
put the division into the weight of a term (`aux * (0.1 / passes)`), so that is a mistake where the
term has no weight, or a whole number as one, and is not known where it has another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from distcheck.recordings.jobs.reading import JobRecording
from distcheck.recordings.jobs.records import Factor, Pass, StepRecord, Term

_SAME = 1e-6  # chosen: numbers of a script, kept in double or single precision (2^-24)


@dataclass(frozen=True)
class Counted:
    """How often the mean loss of a rank's passes counts, 1 where it is right. Or `alone`, terms
    that are not divided where `others` are. Or `why` that is not known.
    """

    times: float = 1.0
    alone: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    why: str = ""


def counted(job: JobRecording, rank: int, step: int) -> Counted:
    """What the terms of a rank's losses say, of a step with several passes."""
    record = job.records[rank, step]
    passes = record.trained
    why = _unlike(passes)
    if why:
        return Counted(why=why)
    terms = [_unscaled(term, record) for term in passes[0].terms]
    numbers = _numbers_of_passes(job, rank)
    divisions = [_divisions(term.factors, numbers) for term in terms]
    if not any(divisions):
        return _undivided(terms, len(passes))
    if all(divisions):
        return _divided(terms, divisions, numbers, len(passes))
    return _partly(terms, divisions)


def may_be_weight(job: JobRecording, rank: int, step: int, number: float) -> bool:
    """Whether a loss that counts so many times does so by a weight: in every pass it is one term
    that was multiplied by this number, where a division by the passes would have done as much.
    """
    record = job.records[rank, step]
    passes = record.trained
    if _unlike(passes) or len(passes[0].terms) != 1:
        return False
    return any(
        not factor.divides and abs(abs(factor.number) - number) <= _SAME * number
        for factor in _unscaled(passes[0].terms[0], record).factors
    )


def _unlike(passes: Sequence[Pass]) -> str:
    """Why the passes of a step have no terms in common."""
    if not passes:
        return "no backward pass was recorded"
    for one in passes:
        if not one.terms:
            return f"it is not a sum of weighted losses ({one.unread or 'none was recorded'})"
    if any(one.terms != passes[0].terms for one in passes[1:]):
        return "the weights of its terms change from one backward pass to the next"
    return ""


def _unscaled(term: Term, record: StepRecord) -> Term:
    scale = [factor for factor in term.factors if factor.number == record.scale][:1]
    rest = [factor for factor in term.factors if not scale or factor is not scale[0]]
    return Term(name=term.name, reduction=term.reduction, call=term.call, factors=tuple(rest))


def _numbers_of_passes(job: JobRecording, rank: int) -> set[int]:
    """How many backward passes the steps have; the last one of an epoch may have fewer."""
    counts = {len(record.trained) for (other, _), record in job.records.items() if other == rank}
    return {count for count in counts if count > 1}


def _divisions(factors: Sequence[Factor], numbers: set[int]) -> int:
    """How many of the factors are one over a number of passes."""
    return sum(
        any(abs(abs(factor.number) * number - 1) <= _SAME for number in numbers)
        for factor in factors
    )


def _is_one(terms: Sequence[Term], times: float) -> bool:
    """Whether a mean among the terms, or all of them together, counts once in so many times."""
    means = [times * term.weight for term in terms if term.reduction == "mean"]
    together = len(means) == len(terms) and abs(sum(means) - 1) <= _SAME
    return together or any(abs(abs(weight) - 1) <= _SAME for weight in means)


def _undivided(terms: Sequence[Term], passes: int) -> Counted:
    if _is_one(terms, 1.0):
        return Counted(times=float(passes))
    return Counted(
        why="none of its terms is divided by the number of backward passes or has the weight 1"
    )


def _divided(
    terms: Sequence[Term], divisions: Sequence[int], numbers: set[int], passes: int
) -> Counted:
    if min(divisions) < 2 or any(_is_one(terms, float(number)) for number in numbers):
        return Counted()
    outer = [factor for factor in terms[0].factors if factor.outer]
    if _divisions(outer, numbers) > 1:
        return Counted(times=1 / passes)
    return Counted(
        why="each of its terms is divided by the number of backward passes twice, or has a weight "
        "of that value"
    )


def _partly(terms: Sequence[Term], divisions: Sequence[int]) -> Counted:
    """Some terms are divided by the number of passes, and others are not."""
    alone = [term for term, count in zip(terms, divisions, strict=True) if not count]
    others = tuple(term.name for term, count in zip(terms, divisions, strict=True) if count)
    certain = [
        term.name
        for term in alone
        if term.reduction == "mean" and not any(factor.computed for factor in term.factors)
    ]
    if certain:
        return Counted(alone=tuple(certain), others=others)
    numbers = [factor.number for factor in alone[0].factors if factor.computed]
    weight = f" in its weight {numbers[0]:.6g}" if numbers else ""
    return Counted(
        why=f"its term {others[0]} is divided by the number of backward passes, but "
        f"{alone[0].name} is not, unless the division is{weight or ' within the term'}; divide "
        "the sum of the terms to check the scale"
    )
