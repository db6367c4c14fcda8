"""What kept runs say of cases: which failed when they were last run; and the last run that passed
with the same strategies, and what else is another: the environment, and the code of strategies and
workloads.

A red run's first question is what has changed since the last green one; only a run can answer it,
a report that is rendered again elsewhere cannot.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.plan.provenance import Provenance, changes
from distcheck.records import Case, SinceGreen
from distcheck.records.decoding import read_if_whole

_MOST_RUNS = 50  # so that a run costs little to plan, whatever is kept


class _Judged(msgspec.Struct, frozen=True):
    """As much of a case in report.json; the rest is skipped, not decoded."""

    verdict: str
    strategy: str
    world: int
    backend: str
    device: str
    dtype: str
    workload: str
    seed: int


class _Report(msgspec.Struct):
    cases: list[_Judged]


def of_cases(runs: Path, cases: Sequence[Case]) -> set[str]:
    """The ids of those cases that failed in the newest of the runs that judged them: that gave them
    a verdict other than unknown.
    """
    last: dict[tuple[object, ...], str] = {}
    for path in sorted(runs.glob("*/report.json"), reverse=True)[:_MOST_RUNS]:
        earlier = read_if_whole(path, _Report)
        for judged in earlier.cases if earlier is not None else ():
            if judged.verdict in ("pass", "fail"):
                last.setdefault(msgspec.structs.astuple(judged)[1:], judged.verdict)
    of = _Judged.__struct_fields__[1:]
    return {
        case.id for case in cases if last.get(tuple(getattr(case, name) for name in of)) == "fail"
    }


def first(cases: Sequence[Case], failed: set[str]) -> list[Case]:
    """The cases, those of a strategy and world with one that failed before the others, and of these
    the ones that failed.
    """
    ahead = {case.siblings for case in cases if case.id in failed}
    place = {case.siblings: number for number, case in reversed(list(enumerate(cases)))}

    def key(case: Case) -> tuple[bool, int, bool]:
        return case.siblings not in ahead, place[case.siblings], case.id not in failed

    return sorted(cases, key=key)


def the_others(cases: Sequence[Case], failed: set[str]) -> dict[str, str]:
    """The ids of the cases that did not fail, with that as the reason to leave them out."""
    why = "you passed --last-failed, and it did not fail in its last run"
    return {case.id: why for case in cases if case.id not in failed}


_Code = dict[tuple[str, str], str]  # by "strategy" or "workload", and its name


class _CaseNamed(msgspec.Struct):
    strategy: str


class _EarlierCase(msgspec.Struct):
    """As much of a saved case; one that can no longer run has been run all the same."""

    strategy: str
    workload: str
    made: Provenance | None = None


class _EarlierReport(msgspec.Struct):
    """As much of report.json as is needed here; the rest is skipped, not decoded."""

    verdict: str
    environment: dict[str, Any]
    cases: list[_CaseNamed]


def since_last_green(
    runs: Path, cases: Sequence[Case], made: Mapping[str, Provenance]
) -> SinceGreen | None:
    """Compares with the newest run in `runs` that passed; None where there is none. `made` says by
    the id of a case where it is run now.
    """
    asked = {case.strategy for case in cases}
    for path in sorted(runs.glob("*/report.json"), reverse=True):
        earlier = read_if_whole(path, _EarlierReport)
        if earlier is None or earlier.verdict != "pass":
            continue
        if asked <= {case.strategy for case in earlier.cases}:
            code = _code_of(path.parent)
            found = [
                change
                for case in cases
                for change in changes(_then(earlier.environment, code, case), made[case.id], case)
            ]
            code_first = sorted(dict.fromkeys(found), key=lambda change: change.kind != "code")
            return SinceGreen(run=path.parent.name, changes=tuple(code_first))
    return None


def _code_of(run: Path) -> _Code:
    found: _Code = {}
    for file in sorted(run.glob("cases/*.json")):
        case = read_if_whole(file, _EarlierCase)
        digests = {} if case is None or case.made is None else case.made.digests
        found |= {
            (what, spec): digests[what]
            for what in ("strategy", "workload")
            if what in digests and (spec := getattr(case, what))
        }
    return found


def _then(environment: Mapping[str, Any], code: _Code, case: Case) -> Provenance:
    """Where a case would have been run, then: by what is known of its code, under any id."""
    known = {(what, getattr(case, what)) for what in ("strategy", "workload")} & code.keys()
    digests = {what: code[what, spec] for what, spec in sorted(known)}
    return Provenance(environment=dict(environment), digests=digests)
