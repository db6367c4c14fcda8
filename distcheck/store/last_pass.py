"""The last kept run that passed with the same strategies, and what else is another: the
environment, and the code of strategies and workloads.

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
    """The digests of all code that a run's saved cases name."""
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
