"""A comparison in the formats of a report: each case has one check, `compare`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.records import Case, CaseReport, CheckResult, Compared, Origin, Report
from distcheck.reports.json_report import as_document
from distcheck.reports.wording import describe_place


@dataclass(frozen=True)
class KnownCase:
    """What a report says of a case beside what was compared."""

    case: Case
    environment: dict[str, Any]
    strategy_file: str
    strategy_line: int = 0


def as_report(
    comparison: RunsComparison, cases: Mapping[str, KnownCase], *, made: Origin, command: str
) -> dict[str, Any]:
    """The document that JUnit and GitHub are written from; `cases` are those of either run,
    `command` makes the comparison again.
    """
    environment = next((saved.environment for saved in cases.values()), {})
    reports = tuple(
        _case(one, cases[one.id], replay=command) for one in comparison.cases if one.id in cases
    )
    return as_document(Report(environment=environment, cases=reports, made=made))


def _case(found: CaseComparison, saved: KnownCase, *, replay: str) -> CaseReport:
    compared = found.found
    place = compared.beyond or compared.first
    said = [f"bits {found.bits}", found.reason]
    if compared.first is not None and compared.beyond is not None:
        said.append(f"beyond its bound: {describe_place(compared.beyond)}")
    tensors = sum(moment.tensors for moment in compared.moments)
    check = CheckResult(
        check="compare",
        layer="-",
        verdict=found.verdict,
        compared=Compared(tensors=tensors, ranks=saved.case.world, steps=saved.case.steps),
        first=place if found.verdict == "fail" else None,
        reason="; ".join(filter(None, said)),
    )
    return CaseReport(
        case=saved.case,
        strategy_file=saved.strategy_file,
        strategy_line=saved.strategy_line,
        verdict=found.verdict,
        outcomes=(),
        checks=(check,),
        diagnosis=found.diagnosis,
        replay=replay,
        notes=tuple(f"changed between the runs: {change}" for change in found.changes),
    )
