"""Deviations from one process that a script means: `distcheck job --accept CAUSE`.

Some are so common that they are remarks, unless `--strict` is given: one seed for the dropout of
all ranks, a learning rate that is multiplied by the number of ranks, or its root, and accelerate's
own way of stepping a schedule once per rank.
Something else is expected of them as of an accepted cause.

An accepted cause fails no check. What it promises instead is checked: a learning rate that grows
with the number of ranks is that of one process times one factor at every step, and a schedule that
steps once per rank is that of one process so many steps later. Of random streams nothing is left
to be checked.
"""

import math
from collections.abc import Iterator, Sequence

from distcheck.errors import UsageError
from distcheck.job.replaying import Reference
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import Allowance, CheckResult, Diagnosis
from distcheck.records.layers import IN_FLOAT32, NO_LAYER

RANDOMNESS, RATES, SCHEDULE = "shared-rng-seed", "learning-rate-differs", "scheduler-steps-per-rank"
KINDS = {
    RANDOMNESS: ("ranks may draw the same random numbers", "independence of RNG streams"),
    RATES: ("one factor between the learning rates of the job and of a single process",
            "the factor itself"),
    SCHEDULE: ("the learning rate at step k is that of a single process at step k * world size",
               "learning rates for which the reference has made too few steps"),
}  # fmt: skip
_CHECKS = {
    RANDOMNESS: ("random streams", NO_LAYER),
    RATES: ("learning rate", IN_FLOAT32),
    SCHEDULE: ("learning rate", IN_FLOAT32),
}
_OF_RANKS = ("learning rate", NO_LAYER)
# Chosen: a schedule computes a rate in double precision, by a chain of some thousand roundings at
# most (1e-13); a rate that is another one differs by more than a millionth.
_SAME_RATE = 1e-9


def check_kinds(kinds: Sequence[str], *, guards: bool = False) -> None:
    """Raises UsageError for a cause that cannot be accepted, by a guard if `guards`."""
    for kind in kinds:
        if guards and kind != RANDOMNESS:
            raise UsageError(
                f"--accept {kind} is not supported with --guard; it takes {RANDOMNESS}"
            )
        if kind not in KINDS:
            raise UsageError(f"--accept {kind} is not supported here; choose {', '.join(KINDS)}")
    if RATES in kinds and SCHEDULE in kinds:
        raise UsageError(
            f"--accept takes one of {RATES} and {SCHEDULE}: together they would let every learning "
            "rate pass"
        )


def remarkable(
    job: JobRecording, reference: Reference | None, results: Sequence[CheckResult]
) -> tuple[str, ...]:
    """The kinds that are remarks where they are named."""
    alike = all(r.verdict != "fail" for r in results if (r.check, r.layer) == _OF_RANKS)
    if reference is None or not alike:
        return (RANDOMNESS,)
    scaling = (float(job.world), math.sqrt(job.world))
    if any(abs(_factor(job, reference) - by) <= _SAME_RATE * by for by in scaling):
        return (RANDOMNESS, RATES)
    return (RANDOMNESS, SCHEDULE) if job.ranks[0].schedules_by else (RANDOMNESS,)


def accept(
    kinds: Sequence[str],
    job: JobRecording,
    reference: Reference | None,
    results: Sequence[CheckResult],
    named: Sequence[Diagnosis],
) -> list[CheckResult]:
    """The results, in which a check that failed by an accepted cause is left out, or compares with
    what that cause promises.
    """
    causes = {one.cause for one in named}
    meant = {_CHECKS[kind]: kind for kind in kinds if kind in causes}
    found = []
    for result in results:
        kind = meant.get((result.check, result.layer))
        if kind is None or result.verdict != "fail":
            found.append(result)
        elif kind != RANDOMNESS:
            assert reference is not None
            found.append(_rates(kind, job, reference, result))
    return found


def allowance(kinds: Sequence[str], named: Sequence[Diagnosis]) -> Allowance | None:
    """What was accepted, for the report; None where no such cause was named without that."""
    causes = {one.cause for one in named}
    used = [kind for kind in dict.fromkeys(kinds) if kind in causes]
    if not used:
        return None
    return Allowance(
        kind=", ".join(used),
        widened=f"({'; '.join(KINDS[kind][0] for kind in used)})",
        not_owed=tuple(KINDS[kind][1] for kind in used),
    )


def _rates(kind: str, job: JobRecording, reference: Reference, result: CheckResult) -> CheckResult:
    """Learning rates, compared with what is promised of them; all other settings as ever."""
    tally = Tally(result.check, result.layer)
    compare = _scaled if kind == RATES else _later
    for step, name, actual, expected in compare(job, reference, tally):
        tally.count(parameter=name, rank=0, step=step, elements=1)
        if not abs(actual - expected) <= _SAME_RATE * abs(expected):  # NaN is not as accepted
            tally.fail(
                f"step {step}: {name} is {actual:.9g}, but the accepted deviation allows "
                f"{expected:.9g}",
                parameter=name, rank=0, step=step, actual=actual, expected=expected,
            )  # fmt: skip
    return tally.result()


Compared = Iterator[tuple[int, str, float, float]]  # step, setting, actual, expected


def _pairs(job: JobRecording, reference: Reference) -> Compared:
    for seen in reference.replayed.steps:
        own = job.records[0, seen.step]
        if seen.skipped or own.skipped:
            continue
        for number, (mine, other) in enumerate(zip(own.groups, seen.groups, strict=False)):
            for key in sorted(set(mine) & set(other)):
                yield seen.step, f"param_groups[{number}]/{key}", mine[key], other[key]


def is_rate(name: str) -> bool:
    """Whether a setting is a learning rate, or one that a schedule begins with."""
    return name.rpartition("/")[2].rpartition("_")[2] == "lr"


def _factor(job: JobRecording, reference: Reference) -> float:
    """The factor of the first learning rate that is not zero; 0 where there is none."""
    for _, name, actual, expected in _pairs(job, reference):
        if is_rate(name) and expected:
            return actual / expected
    return 0.0


def _scaled(job: JobRecording, reference: Reference, tally: Tally) -> Compared:
    """Every rate is the reference's times the factor of the first one that is not zero. A warm-up
    may begin at one rate for both: then what it has risen is such a multiple.
    """
    factor = _factor(job, reference)
    tally.remark(f"learning rates are {factor:.6g}x the single-process reference")
    pairs = list(_pairs(job, reference))
    begins = {n: was for step, n, own, was in pairs if step == job.steps[0] and own == was}
    tops = {n.replace("/initial_lr", "/lr"): was for _, n, _, was in pairs if "/initial_lr" in n}
    for step, name, actual, expected in pairs:
        low, top = begins.get(name, 0.0), tops.get(name, 0.0)
        risen = (factor * top - low) / (top - low) if top > low else factor
        low = low if top > low else 0.0
        yield step, name, actual, low + risen * (expected - low) if is_rate(name) else expected


def _later(job: JobRecording, reference: Reference, tally: Tally) -> Compared:
    """Every rate is the reference's, as many times further on as there are ranks."""
    pairs = list(_pairs(job, reference))
    rates = {(step, name): expected for step, name, _, expected in pairs}
    first, later = job.steps[0], 0
    for step, name, actual, expected in pairs:
        if not name.endswith("/lr"):
            yield step, name, actual, expected
            continue
        then = first + (step - first) * job.world
        if (then, name) in rates:
            later += step > first
            yield step, name, actual, rates[then, name]
    if later:
        tally.remark("the schedule steps once per rank")
    else:
        tally.missing(
            f"the reference covers no step {job.world} times as far along; pass more --steps"
        )
