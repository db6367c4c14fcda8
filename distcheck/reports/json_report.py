"""The report as `distcheck.report/1`: what a gate or a dashboard reads."""

from typing import Any

import msgspec

from distcheck.records import CaseReport, CheckResult, Difference, Report
from distcheck.reports.wording import describe_place

SCHEMA = "distcheck.report/1"


def render_json(report: Report) -> str:
    """The whole report as JSON text."""
    return msgspec.json.format(msgspec.json.encode(as_document(report)), indent=2).decode() + "\n"


def as_document(report: Report) -> dict[str, Any]:
    """The report as plain dictionaries and lists; docs/report.md explains every key."""
    return {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "exit_code": int(report.exit_code),
        "environment": report.environment,
        "cases": [_case(case) for case in report.cases],
    }


def _case(report: CaseReport) -> dict[str, Any]:
    case = report.case
    return {
        "id": case.id,
        "strategy": case.strategy,
        "strategy_file": report.strategy_file,
        "world": case.world,
        "backend": case.backend,
        "device": case.device,
        "dtype": case.dtype,
        "workload": case.workload,
        "batch": case.batch,
        "steps": case.steps,
        "seed": case.seed,
        "verdict": report.verdict,
        "outcomes": [
            {"rank": o.rank, "outcome": o.outcome, "detail": o.detail} for o in report.outcomes
        ],
        "checks": [_check(result) for result in report.checks],
        "diagnosis": [
            {"cause": d.cause, "evidence": d.evidence, "suggestion": d.suggestion}
            for d in report.diagnosis
        ],
        "timings_s": report.timings_s,
        "replay": report.replay,
    }


def _check(result: CheckResult) -> dict[str, Any]:
    compared = result.compared
    reason = result.reason
    if result.verdict == "fail" and result.first is not None:
        first = f"first divergence: {describe_place(result.first)}"
        reason = "; ".join(filter(None, [first, reason]))
    return {
        "check": result.check,
        "layer": result.layer,
        "verdict": result.verdict,
        "compared": {
            "tensors": compared.tensors,
            "elements": compared.elements,
            "ranks": compared.ranks,
            "steps": compared.steps,
        },
        "worst": None if result.worst is None else _difference(result.worst),
        "reason": reason,
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "parameter": difference.parameter,
        "rank": difference.rank,
        "step": difference.step,
        "index": list(difference.index),
        "actual": difference.actual,
        "expected": difference.expected,
        "error": difference.error,
        "bound": difference.bound,
        "ulp": difference.ulp,
    }
