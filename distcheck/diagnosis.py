"""From findings to named causes, each with its evidence and one suggestion.

A cause is named only where the evidence carries it; a mismatch that none explains is reported
as `unexplained`, with what was seen.
"""

import re
from collections.abc import Sequence

from distcheck.records import CheckResult, Diagnosis, Outcome

_LAST_COLLECTIVE = re.compile(r"last collective: (\w+) of \[([^]]*)\], number (\d+), not finished")


def diagnose(
    outcomes: Sequence[Outcome], results: Sequence[CheckResult]
) -> list[Diagnosis]:
    """The causes behind a case's failures; nothing for a case that did not fail."""
    found = [*_from_outcomes(outcomes)]
    failed = {(r.check, r.layer): r for r in results if r.verdict == "fail"}
    checks = {check for check, _ in failed}
    if not checks - {"outcome"}:
        return found
    first = next(r for r in failed.values() if r.check != "outcome")
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
                suggestion="start at the first divergence; checks above it passed",
            )
        )
    return found


def _from_outcomes(outcomes: Sequence[Outcome]) -> list[Diagnosis]:
    bad = [o for o in outcomes if o.outcome != "finished"]
    if not bad:
        return []
    cause = bad[0]
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
    waiting = {o.rank: _LAST_COLLECTIVE.search(o.detail) for o in bad}
    calls = {match.groups() for match in waiting.values() if match}
    elsewhere = [rank for rank, match in waiting.items() if match is None]
    finished = [o.rank for o in outcomes if o.outcome == "finished"]
    if len(calls) > 1 or (calls and (elsewhere or finished)):
        parts = [
            f"rank {rank} is in {match[1]} of [{match[2]}], its collective number {match[3]}"
            for rank, match in sorted(waiting.items())
            if match
        ]
        parts += [f"rank {rank} is in none" for rank in elsewhere]
        parts += [f"rank {rank} had finished" for rank in finished]
        return [
            Diagnosis(
                cause="collective-mismatch",
                evidence="; ".join(parts),
                suggestion="every rank must make the same collective calls, in the same order, "
                "with the same shapes: look for a call inside a condition that depends on the "
                "rank or on its data",
            )
        ]
    return [
        Diagnosis(
            cause="hang",
            evidence=f"{len(bad)} ranks made no progress and used no processor time",
            suggestion="the stacks above show where each rank waits",
        )
    ]


def _where(result: CheckResult) -> str:
    place = result.first or result.worst
    if place is None:
        return result.reason
    index = f"[{','.join(map(str, place.index))}]" if place.index else ""
    return f"step {place.step}, {place.parameter}{index}, rank {place.rank}"
