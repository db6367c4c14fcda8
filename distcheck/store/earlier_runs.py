"""Earlier runs: cases that failed most recently, and the last passing run of the same strategies,
with the differences since then in the environment and in the code of strategies and workloads.

The first question about a failed run is what changed since the last pass. Only the process that
runs the verification can answer it, because a report may be rendered on a different machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.plan.provenance import Provenance, provenance_changes
from distcheck.records import Case, ChangesSinceLastPass
from distcheck.records.decoding import read_or_none
from distcheck.store.run_folder import age_key

_MOST_RUNS = 50  # limits the cost of planning a run


class _Judged(msgspec.Struct, frozen=True):
    """The needed fields of a case in report.json; the rest is skipped, not decoded."""

    verdict: str
    case: Case


class _EarlierReport(msgspec.Struct):
    """The needed fields of report.json."""

    verdict: str
    environment: dict[str, Any]
    cases: list[_Judged]


def ids_of_failed_cases(runs: Path, cases: Sequence[Case]) -> set[str]:
    """Return the ids of cases whose most recent verdict was a failure."""
    last: dict[tuple[object, ...], str] = {}
    for path in _reports_in(runs)[:_MOST_RUNS]:
        earlier = read_or_none(path, _EarlierReport)
        for judged in earlier.cases if earlier is not None else ():
            if judged.verdict in ("pass", "fail"):
                last.setdefault(judged.case.cell, judged.verdict)
    return {case.id for case in cases if last.get(case.cell) == "fail"}


def with_failed_first(cases: Sequence[Case], failed: set[str]) -> list[Case]:
    """Return the cases reordered: strategies and worlds with failed cases, failed ones first."""
    ahead = {case.sibling_key for case in cases if case.id in failed}
    place = {case.sibling_key: number for number, case in reversed(list(enumerate(cases)))}

    def key(case: Case) -> tuple[bool, int, bool]:
        return case.sibling_key not in ahead, place[case.sibling_key], case.id not in failed

    return sorted(cases, key=key)


def reasons_to_skip_passed(cases: Sequence[Case], failed: set[str]) -> dict[str, str]:
    """Return the reason for leaving out each case that did not fail, by id."""
    why = "you passed --last-failed, and it did not fail in its last run"
    return {case.id: why for case in cases if case.id not in failed}


_Code = dict[tuple[str, str], str]  # by "strategy" or "workload", and its name


class _EarlierCase(msgspec.Struct):
    """The needed fields of a saved case, which may no longer be runnable."""

    strategy: str
    workload: str
    made: Provenance | None = None


def changes_since_last_pass(
    runs: Path, cases: Sequence[Case], made: Mapping[str, Provenance]
) -> ChangesSinceLastPass | None:
    """Compare with the newest passing run, or return None; `made` has current provenances."""
    asked = {case.strategy for case in cases}
    for path in _reports_in(runs):
        earlier = read_or_none(path, _EarlierReport)
        if earlier is None or earlier.verdict != "pass":
            continue
        if asked <= {report.case.strategy for report in earlier.cases}:
            code = _code_of(path.parent)
            found = [
                change
                for case in cases
                for change in provenance_changes(
                    _past_provenance(earlier.environment, code, case), made[case.id], case
                )
            ]
            code_first = sorted(dict.fromkeys(found), key=lambda change: change.kind != "code")
            return ChangesSinceLastPass(run=path.parent.name, changes=tuple(code_first))
    return None


def _reports_in(runs: Path) -> list[Path]:
    return sorted(runs.glob("*/report.json"), key=lambda file: age_key(file.parent), reverse=True)


def _code_of(run: Path) -> _Code:
    found: _Code = {}
    for file in sorted(run.glob("cases/*.json")):
        case = read_or_none(file, _EarlierCase)
        digests = {} if case is None or case.made is None else case.made.digests
        found |= {
            (what, spec): digests[what]
            for what in ("strategy", "workload")
            if what in digests and (spec := getattr(case, what))
        }
    return found


def _past_provenance(environment: Mapping[str, Any], code: _Code, case: Case) -> Provenance:
    """Return the provenance that a case would have had then, from known code digests."""
    known = {(what, getattr(case, what)) for what in ("strategy", "workload")} & code.keys()
    digests = {what: code[what, spec] for what, spec in sorted(known)}
    return Provenance(environment=dict(environment), digests=digests)
