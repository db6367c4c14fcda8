"""Converts the results of a schedule search to a check result, and finds the cause of a failure."""

from collections.abc import Callable, Iterator, Sequence

from distcheck.records import CheckResult, Compared, Diagnosis, VerdictName
from distcheck.records.causes import name_cause
from distcheck.records.schedules import (
    BUFFERED,
    KINDS,
    PostedTurn,
    ScheduleRun,
    ScheduleSearchResult,
    SearchCoverage,
    parse_schedule,
)

CHECK = "schedules"
_MOST_LINES = 14  # of one timeline
_BEFORE = 5  # lines before the divergence
_NOTHING = Compared()
Digests = Callable[[bytes], Sequence[str]]


def check_schedules(
    found: ScheduleSearchResult, *, ranks: int, digests: Digests, replay: str
) -> tuple[CheckResult, list[Diagnosis]]:
    """Return the check result and, if the check failed, its cause. `digests` reads a rank's result
    as one digest per step. `replay` is the command that, with a schedule added, reproduces the
    divergent run.
    """
    steps = len(digests(found.usual.results[0])) if found.usual.results else 0
    compared = Compared(ranks=ranks, steps=steps)
    if found.usual.end != "finished":
        reason = f"not compared: the usual schedule did not finish ({found.usual.what})"
        return _result("unknown", reason), _saved_by_buffering(found)
    if found.usual.came_to != found.again.came_to:
        return _judge_nondeterminism(found.usual, found.again, compared, digests)
    if found.other is not None and not found.repeats:
        return _judge_nondeterminism(found.usual, found.other, compared, digests)
    if found.other is None and found.late:
        reason = (
            f"{len(found.late)} of {found.ran} schedules did not end in time (first "
            f"{found.late[0]}); the others were bit-identical to the usual one; pass a longer "
            "--deadline"
        )
        return _result("unknown", reason, compared), []
    if found.other is None:
        return _all_equal(found, compared), []
    return _depends(found, compared, digests, replay)


def _result(verdict: VerdictName, reason: str, compared: Compared = _NOTHING) -> CheckResult:
    return CheckResult(check=CHECK, layer="-", verdict=verdict, compared=compared, reason=reason)


def _all_equal(found: ScheduleSearchResult, compared: Compared) -> CheckResult:
    reason = f"{found.ran} schedules ({', '.join(KINDS)}; sends buffered in half of them)"
    reason = reason if found.covered is None else _describe_coverage(found.ran, found.covered)
    reason += (
        f" were bit-identical to the usual one; calls occurred in {found.distinct} different orders"
    )
    return _result("pass", reason, compared)


def _describe_coverage(ran: int, covered: SearchCoverage) -> str:
    """Describe the coverage of schedules with few preemptions: "all" only if all were run."""
    each = " (each also with buffered sends)" if covered.buffered else ""
    if covered.all:
        return f"all {ran} possible schedules{each}"
    if covered.preemptions == covered.most:
        return f"all {ran} schedules with at most {_preemptions(covered.most)}{each}"
    more = f"{covered.further} of those with {_preemptions(covered.preemptions + 1)}"
    if covered.preemptions < 1:
        return f"{ran} schedules with at most {_preemptions(1)}, not all of them{each},"
    whole = f"all with at most {_preemptions(covered.preemptions)}"
    return f"{ran} schedules{each}, which are {whole} and {more},"


def _preemptions(count: int) -> str:
    return f"{count} preemption{'s' * (count != 1)}"


def describe_search(found: ScheduleSearchResult) -> str:
    """Describe the search that found the divergent run."""
    drawn = found.drawn
    first = f"seed {drawn}" if drawn.isdecimal() else f"schedule {drawn}"
    return f"found by {first}, shrunk in {found.shrinking} runs"


def _saved_by_buffering(found: ScheduleSearchResult) -> list[Diagnosis]:
    if found.buffered is None or found.buffered.end != "finished":
        return []
    finishes = "if sends complete as soon as they are posted, the same code finishes"
    return [name_cause("needs-buffering", f"{found.usual.what}; {finishes}")]


def _judge_nondeterminism(
    usual: ScheduleRun, other: ScheduleRun, compared: Compared, digests: Digests
) -> tuple[CheckResult, list[Diagnosis]]:
    schedule = "the same schedule" if usual.schedule == other.schedule else (
        f"the schedule {other.schedule}, whose result varies from run to run"
    )  # fmt: skip
    evidence = (
        f"two runs under {schedule}, with the same inputs, {_effect_of(other)}"
        f"{_where(usual, other, digests)}: the code depends on something that no schedule "
        "controls, such as the clock, system randomness or another thread"
    )
    cause = name_cause("nondeterministic", evidence, "one-schedule")
    return _result("fail", evidence, compared), [cause]


def _depends(
    found: ScheduleSearchResult, compared: Compared, digests: Digests, replay: str
) -> tuple[CheckResult, list[Diagnosis]]:
    other = found.other
    assert other is not None
    differences = [BUFFERED + " sends"] if parse_schedule(other.schedule).buffered else []
    differences += [_preemptions(len(other.preemptions))] if other.preemptions else []
    evidence = (
        f"with {' and '.join(differences) or 'the same interleaving'}, the same inputs "
        f"{_effect_of(other)}{_where(found.usual, other, digests)}"
    )
    lines = "\n".join([evidence, describe_search(found), *differing_calls(found.usual, other)])
    race = _race(found.usual, other)
    cause, lines = ("message-race", f"{race}; {lines}") if race else ("depends-on-schedule", lines)
    command = f"{replay} --schedule {other.schedule}"
    named = name_cause(cause, lines, "usual", "run-again", command=command)
    return _result("fail", evidence, compared), [named]


def _race(usual: ScheduleRun, other: ScheduleRun) -> str:
    """Return the first receive from any rank that received a different message in the divergent
    run.
    """
    ours, theirs = _receives(usual), _receives(other)
    for place, turn in ours.items():
        taken = theirs.get(place)
        if taken is not None and turn.took and taken.took and turn.took != taken.took:
            return (
                f"rank {turn.rank}'s {turn.call}{turn.where} receives whichever message arrives "
                f"first: that of {turn.took} or that of {taken.took}"
            )
    return ""


def _receives(run: ScheduleRun) -> dict[tuple[int, int], PostedTurn]:
    found: dict[tuple[int, int], PostedTurn] = {}
    counts: dict[int, int] = {}
    for turn in run.turns:
        if turn.took:
            counts[turn.rank] = counts.get(turn.rank, 0) + 1
            found[turn.rank, counts[turn.rank]] = turn
    return found


def _effect_of(other: ScheduleRun) -> str:
    return (
        "yield different bits"
        if other.end == "finished"
        else (f"end in a {other.end}: {other.what}")
    )


def _where(usual: ScheduleRun, other: ScheduleRun, digests: Digests) -> str:
    """Return the first step at which bits differ, and the ranks on which they differ."""
    if other.end != "finished" or usual.end != "finished":
        return ""
    pairs = [(digests(a), digests(b)) for a, b in zip(usual.results, other.results, strict=False)]
    steps = [
        (step, rank)
        for rank, (first, second) in enumerate(pairs)
        for step, (a, b) in enumerate(zip(first, second, strict=False))
        if a != b
    ]
    if not steps:
        return ""
    first_step = min(steps)[0]
    ranks = [str(rank) for step, rank in steps if step == first_step]
    return f", first after step {first_step} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"


def differing_calls(usual: ScheduleRun, other: ScheduleRun) -> Iterator[str]:
    """Yield lines that show the calls of both runs around the first call that differs."""
    apart = next(
        (
            place
            for place, (a, b) in enumerate(zip(usual.turns, other.turns, strict=False))
            if (a.rank, a.call, a.where) != (b.rank, b.call, b.where)
        ),
        min(len(usual.turns), len(other.turns)),
    )
    begins = max(0, apart - _BEFORE)
    for name, run in (("usual schedule", usual), ("this schedule", other)):
        yield f"{name}, from call {begins + 1}:"
        for place, turn in enumerate(run.turns[begins : begins + _MOST_LINES], start=begins):
            yield f"  {'>' if place == apart else ' '} {_format_turn(turn)}"


def _format_turn(turn: PostedTurn) -> str:
    switched = "  (switched to this rank)" if turn.switched else ""
    return f"rank {turn.rank}: {turn.call}{turn.where}{switched}"
