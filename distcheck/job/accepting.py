"""Accepted deviations from the single-process reference: `distcheck job --accept CAUSE`.

Some deviations are so common that they are only warnings unless `--strict` is given: one dropout
seed for all ranks (but not one seed for the noise of different samples), a learning rate multiplied
by the world size or its square root, and accelerate's convention of stepping a schedule once per
rank.

An accepted cause fails no check, but what the user accepts with it is checked: a scaled learning
rate must be the reference's times the same factor at every step, and a schedule that steps once per
rank must equal the reference's schedule at step k * world size. For shared RNG streams there is
nothing further to check.
"""

import math
from collections.abc import Iterator, Sequence

from distcheck.errors import UsageError
from distcheck.job.replaying import Reference
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.jobs.reading import JobRecording
from distcheck.records import AcceptedChanges, CheckResult, Diagnosis, FindingKind
from distcheck.records.layers import IN_FLOAT32, NO_LAYER

RANDOMNESS, RATES, SCHEDULE = "shared-rng-seed", "learning-rate-differs", "scheduler-steps-per-rank"
KINDS = {
    RANDOMNESS: ("ranks may draw the same random numbers", "independence of RNG streams"),
    RATES: ("one factor between the learning rates of the job and of a single process",
            "the factor itself"),
    SCHEDULE: ("the learning rate at step k is that of a single process at step k * world size",
               "learning rates for which the reference made too few steps"),
}  # fmt: skip
_CHECKS = {
    RANDOMNESS: ("random streams", NO_LAYER),
    RATES: ("learning rate", IN_FLOAT32),
    SCHEDULE: ("learning rate", IN_FLOAT32),
}
_OF_RANKS = ("learning rate", NO_LAYER)
# Heuristic: a schedule computes a rate in double precision with at most some thousand roundings
# (1e-13); a rate that is really different differs by more than a millionth.
_SAME_RATE = 1e-9


def check_kinds(kinds: Sequence[str], *, guards: bool = False) -> None:
    """Raise UsageError for a cause that cannot be accepted; with `guards`, that a guard cannot
    accept.
    """
    for kind in kinds:
        if guards and kind != RANDOMNESS:
            raise UsageError(
                f"--accept {kind} is not supported with --guard; it takes {RANDOMNESS}"
            )
        if kind not in KINDS:
            raise UsageError(f"--accept {kind} is not supported here; choose {', '.join(KINDS)}")
    if RATES in kinds and SCHEDULE in kinds:
        raise UsageError(
            f"--accept takes one of {RATES} and {SCHEDULE}: together they would accept every "
            "learning rate"
        )


def kinds_that_only_warn(
    job: JobRecording, reference: Reference | None, results: Sequence[CheckResult]
) -> tuple[str, ...]:
    """Return the kinds of deviation in this job that are only warnings."""
    is_noise = any(result.first_kind is FindingKind.SAME_NOISE for result in results)
    common = () if is_noise else (RANDOMNESS,)
    alike = all(r.verdict != "fail" for r in results if (r.check, r.layer) == _OF_RANKS)
    if reference is None or not alike:
        return common
    scaling = (float(job.world), math.sqrt(job.world))
    if any(abs(_factor(job, reference) - by) <= _SAME_RATE * by for by in scaling):
        return (*common, RATES)
    return (*common, SCHEDULE) if job.ranks[0].schedules_by else common


def accept(
    kinds: Sequence[str],
    job: JobRecording,
    reference: Reference | None,
    results: Sequence[CheckResult],
    named: Sequence[Diagnosis],
) -> list[CheckResult]:
    """Return the results without the checks that failed because of an accepted cause. If the cause
    has a condition that can be checked, the comparison with this condition replaces the failed
    check.
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


def allowance_of_job(kinds: Sequence[str], named: Sequence[Diagnosis]) -> AcceptedChanges | None:
    """Return the accepted deviations for the report, or None if no accepted cause was found."""
    causes = {one.cause for one in named}
    used = [kind for kind in dict.fromkeys(kinds) if kind in causes]
    if not used:
        return None
    return AcceptedChanges(
        kind=", ".join(used),
        widened=f"({'; '.join(KINDS[kind][0] for kind in used)})",
        not_owed=tuple(KINDS[kind][1] for kind in used),
    )


def _rates(kind: str, job: JobRecording, reference: Reference, result: CheckResult) -> CheckResult:
    """Compare learning rates with those that the accepted cause implies, and all other settings as
    usual.
    """
    tally = Tally(result.check, result.layer)
    compare = _check_scaled_rate if kind == RATES else _check_schedule
    for step, name, actual, expected in compare(job, reference, tally):
        tally.count(parameter=name, rank=0, step=step, elements=1)
        if not abs(actual - expected) <= _SAME_RATE * abs(expected):  # NaN is never accepted
            tally.fail(
                f"step {step}: {name} is {actual:.9g}, but the accepted deviation allows "
                f"{expected:.9g}",
                parameter=name, rank=0, step=step, actual=actual, expected=expected,
            )  # fmt: skip
    return tally.result()


Compared = Iterator[tuple[int, str, float, float]]  # step, setting, actual, expected


def _settings_pairs(job: JobRecording, reference: Reference) -> Compared:
    for seen in reference.replayed.steps:
        own = job.records[0, seen.step]
        if seen.skipped or own.skipped:
            continue
        for number, (mine, other) in enumerate(zip(own.groups, seen.groups, strict=False)):
            for key in sorted(set(mine) & set(other)):
                yield seen.step, f"param_groups[{number}]/{key}", mine[key], other[key]


def is_rate(name: str) -> bool:
    """Return True if a setting is a learning rate, or the initial learning rate of a schedule."""
    return name.rpartition("/")[2].rpartition("_")[2] == "lr"


def _factor(job: JobRecording, reference: Reference) -> float:
    """Return the ratio of the first nonzero learning rate to the reference's, or 0."""
    for _, name, actual, expected in _settings_pairs(job, reference):
        if is_rate(name) and expected:
            return actual / expected
    return 0.0


def _check_scaled_rate(job: JobRecording, reference: Reference, tally: Tally) -> Compared:
    """Expect every learning rate to be the reference's times the factor of the first nonzero
    learning rate.

    A warm-up may begin at the same learning rate in both runs; then only its increase is scaled.
    """
    factor = _factor(job, reference)
    tally.remark(f"learning rates are {factor:.6g}x the single-process reference")
    pairs = list(_settings_pairs(job, reference))
    begins = {n: was for step, n, own, was in pairs if step == job.steps[0] and own == was}
    tops = {n.replace("/initial_lr", "/lr"): was for _, n, _, was in pairs if "/initial_lr" in n}
    for step, name, actual, expected in pairs:
        low, top = begins.get(name, 0.0), tops.get(name, 0.0)
        risen = (factor * top - low) / (top - low) if top > low else factor
        low = low if top > low else 0.0
        yield step, name, actual, low + risen * (expected - low) if is_rate(name) else expected


def _check_schedule(job: JobRecording, reference: Reference, tally: Tally) -> Compared:
    """Expect scheduled settings to equal the reference's at step k * world size."""
    pairs = list(_settings_pairs(job, reference))
    rates = {(step, name): expected for step, name, _, expected in pairs}
    first, later = job.steps[0], 0
    varies = {name for step, name, _, now in pairs if rates.get((first, name), now) != now}
    for step, name, actual, expected in pairs:
        if not name.endswith("/lr") and name not in varies:
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
