"""From findings to named causes, each with its evidence and one suggestion.

A cause is named only where the evidence carries it; a mismatch that none explains is reported
as `unexplained`, with what was seen.
"""

import re
from collections.abc import Sequence

from distcheck.checks.merging import earliest_failure
from distcheck.records import CheckResult, Diagnosis, Outcome

_LAST_COLLECTIVE = re.compile(r"last collective: (\w+) of \[([^]]*)\], number (\d+), not finished")


_SAME_CALLS = (
    "every rank must make the same collective calls, in the same order, with the same shapes: "
    "look for a call inside a condition that depends on the rank or on its data"
)


def diagnose(outcomes: Sequence[Outcome], results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The causes behind a case's failures; nothing for a case that did not fail."""
    found = [*_from_outcomes(outcomes)]
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks - {"outcome"}:
        return found
    first = earliest_failure([r for r in failed.values() if r.check != "outcome"])
    assert first is not None
    if checks == {"rerun"}:
        found.append(
            Diagnosis(
                cause="nondeterministic",
                evidence=f"everything agreed with one machine, but two runs with the same seeds "
                f"did not agree with each other: {_where(first)}",
                suggestion="look for an order that differs from run to run: arrival order, "
                "threads, hashing, a clock, a random number that no seed covers",
            )
        )
    elif "initial state" in checks:
        found.append(
            Diagnosis(
                cause="initial-state-differs",
                evidence=f"ranks did not begin where one machine begins: "
                f"{_where(failed[('initial state', '-')])}",
                suggestion="build the model from the same seed on every rank, or broadcast rank "
                "0's parameters and buffers before the first step",
            )
        )
    elif not found:
        found.append(
            Diagnosis(
                cause="unexplained",
                evidence=f"{first.check} differ first: {_where(first)}",
                suggestion="start at that step: all that was compared before it agreed",
            )
        )
    return found


def _from_outcomes(outcomes: Sequence[Outcome]) -> list[Diagnosis]:
    bad = [o for o in outcomes if o.outcome != "finished"]
    if not bad:
        return []
    cause = bad[0]
    if "collective mismatch" in cause.detail:
        return [
            Diagnosis(
                cause="collective-mismatch",
                evidence=f"the backend received a message of the wrong size on rank {cause.rank}",
                suggestion=_SAME_CALLS,
            )
        ]
    if cause.outcome != "hung":
        last = cause.detail.splitlines()[0] if cause.detail else ""
        return [
            Diagnosis(
                cause="crash",
                evidence=f"rank {cause.rank} {cause.outcome} ({last}); what other ranks report "
                "came after it",
                suggestion=f"read rank {cause.rank}'s traceback first",
            )
        ]
    return [_of_hang(bad, [o.rank for o in outcomes if o.outcome == "finished"])]


def _of_hang(hung: Sequence[Outcome], finished: Sequence[int]) -> Diagnosis:
    """Ranks in different collectives, or waiting for one that has left: a mismatch. A rank that
    is in no collective, while the others wait for it: a hang of that rank's own.
    """
    calls: dict[str, list[int]] = {}
    elsewhere = []
    for outcome in hung:
        match = _LAST_COLLECTIVE.search(outcome.detail)
        if match is None:
            elsewhere.append(outcome.rank)
        else:
            call = f"{match[1]} of [{match[2]}], number {match[3]}"
            calls.setdefault(call, []).append(outcome.rank)
    parts = [f"{_ranks(ranks)} in {call}" for call, ranks in calls.items()]
    parts += [f"{_ranks(elsewhere)} in no collective"] if elsewhere else []
    parts += [f"{_ranks(finished)} finished"] if finished else []
    evidence = "; ".join(parts)
    if len(calls) > 1 or (calls and finished):
        return Diagnosis(cause="collective-mismatch", evidence=evidence, suggestion=_SAME_CALLS)
    return Diagnosis(
        cause="hang",
        evidence=f"no progress until the deadline: {evidence}",
        suggestion=f"the stack of {_ranks(elsewhere or next(iter(calls.values())))} shows where",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _where(result: CheckResult) -> str:
    place = result.first or result.worst
    if place is None:
        return result.reason
    index = f"[{','.join(map(str, place.index))}]" if place.index else ""
    return f"step {place.step}, {place.parameter}{index}, rank {place.rank}"
