"""The report as `distcheck.report/1`: what a gate or a dashboard reads."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from distcheck.errors import UsageError
from distcheck.errors.shown_text import encodable
from distcheck.records import (
    Allowance,
    CaseReport,
    CheckResult,
    Diagnosis,
    Difference,
    Outcome,
    Report,
    VerdictName,
)
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.records.ends import RankEnd
from distcheck.records.mistakes import MISTAKES
from distcheck.reports import scale
from distcheck.reports.aggregated import as_keys
from distcheck.reports.shape import check_shape
from distcheck.reports.wording import describe_place

SCHEMA = "distcheck.report/1"
_MOST_DEPTH = 32
_MOST_SILENT = 256  # tensors that are named


def render_json(report: Report) -> str:
    """The whole report as JSON text."""
    return render(as_document(report))


def render(document: dict[str, Any]) -> str:
    """A document as JSON text."""
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a name of a file that is not UTF-8
        data = msgspec.json.encode(encodable(document))
    return msgspec.json.format(data, indent=2).decode() + "\n"


def read_document(path: Path) -> dict[str, Any]:
    """A document from its file. Raises UsageError for what is not one, is damaged, or is one of
    another schema.
    """
    try:
        document = decode_json(read_bounded(path), dict[str, Any])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not a report that --json wrote: {error}") from error
    if _is_deep(document, _MOST_DEPTH):
        raise UsageError(f"{path} is not a report that --json wrote: it is nested too deeply")
    if document.get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has the schema {document.get('schema')!r}; this version reads {SCHEMA!r}, the "
            "--json of verify, replay, recheck, job and merge; write the report again with one of "
            "them"
        )
    check_shape(document, path)
    return document


def _is_deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(most == 0 or _is_deep(one, most - 1) for one in inner)


class CaseInReport(msgspec.Struct, frozen=True):
    """What other commands rely on in a case of a document."""

    id: str
    strategy: str
    strategy_file: str
    verdict: VerdictName


class _Told(msgspec.Struct, frozen=True):
    cases: list[CaseInReport]


def cases_read(document: dict[str, Any], path: Path) -> list[CaseInReport]:
    """The cases of a document that was read from `path`. Raises UsageError where it is damaged."""
    try:
        return msgspec.convert(document, _Told).cases
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is damaged: {error}; write the report again") from error


def as_document(report: Report) -> dict[str, Any]:
    """The report as plain dictionaries and lists; docs/report.md explains every key."""
    cases = [_case(case) for case in report.cases]
    scaled = scale.as_rows(cases)
    return {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "exit_code": int(report.exit_code),
        "totals": totals_of([case.verdict for case in report.cases], report.left_out),
        "made": None if report.made is None else msgspec.to_builtins(report.made),
        "environment": report.environment,
        "since_green": None
        if report.since_green is None
        else msgspec.to_builtins(report.since_green),
        "cases": cases,
        "plan": None if report.plan is None else msgspec.to_builtins(report.plan),
        "left_out": report.left_out,
        "not_shown": list(report.not_shown),
        "explored": [msgspec.to_builtins(explored) for explored in report.explored],
        **({"scale": scaled} if scaled else {}),
    }


def totals_of(verdicts: Iterable[str], left_out: Collection[str]) -> dict[str, int]:
    """How many cases there are with each verdict, and how many were left out."""
    counts = Counter(verdicts)
    return {
        "pass": counts["pass"],
        "unknown": counts["unknown"],
        "fail": counts["fail"],
        "left_out": len(left_out),
    }


def _case(report: CaseReport) -> dict[str, Any]:
    case = report.case
    return {
        "id": case.id,
        "strategy": case.strategy,
        "strategy_file": report.strategy_file,
        "strategy_line": report.strategy_line,
        "world": case.world,
        "backend": case.backend,
        "device": case.device,
        "dtype": case.dtype,
        "workload": case.workload,
        "data": case.data,
        "data_dir": case.data_dir,
        "batch": case.batch,
        "steps": case.steps,
        "seed": case.seed,
        "as": case.adaptation.form,
        "arguments": dict(case.adaptation.arguments),
        "variables": dict(case.adaptation.variables),
        "finish": case.adaptation.finish,
        "reset": case.adaptation.reset,
        "without_data": list(case.adaptation.without_data),
        "loss": case.loss,
        "accept": case.accept,
        "separate": case.separate,
        "verdict": report.verdict,
        "outcomes": [_outcome(outcome) for outcome in report.outcomes],
        "checks": [_check(result) for result in report.checks],
        "diagnosis": _causes(report.diagnosis),
        **({"remarks": _causes(report.remarks)} if report.remarks else {}),
        "timings_s": report.timings_s,
        "replay": report.replay,
        "command": case.command_line,
        "notes": list(report.notes),
        "accepted": None if report.accepted is None else _accepted(report.accepted),
        "contents": None if report.contents is None else msgspec.to_builtins(report.contents),
    }


def _causes(found: Sequence[Diagnosis]) -> list[dict[str, str]]:
    return [{"cause": d.cause, "evidence": d.evidence, "suggestion": d.suggestion} for d in found]


def _accepted(allowance: Allowance) -> dict[str, Any]:
    return {
        "kind": allowance.kind,
        "widened": allowance.widened,
        "not_owed": list(allowance.not_owed),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    found = {"rank": outcome.rank, "outcome": outcome.outcome, "detail": outcome.detail}
    if outcome.outcome != RankEnd.FINISHED:
        found |= {"lost_peer": outcome.lost_peer, "sizes_differ": outcome.sizes_differ}
    if outcome.proven:
        found |= {"proven": outcome.proven, "why": outcome.why}
    if outcome.collectives:
        found["collectives"] = msgspec.to_builtins(outcome.collectives)
    return found


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
        "first": None if result.first is None else _difference(result.first),
        "reason": reason,
        **({"defect": result.defect} if result.defect else {}),
        **({"sensitivity": _sensitivity(result)} if result.shown else {}),
        **as_keys(result),
    }


def _sensitivity(result: CheckResult) -> dict[str, Any]:
    """Which tensors would have shown which of the simplest mistakes."""
    tensors = result.shown
    mistakes = {}
    for name in MISTAKES:
        possible = {tensor: one.shown[name] for tensor, one in tensors.items() if name in one.shown}
        if possible:
            most = max(map(len, possible.values()))
            silent = [tensor for tensor, ranks in possible.items() if len(ranks) < max(1, most)]
            mistakes[name] = {
                "tensors": len(possible) - len(silent),
                "of": len(possible),
                "not_in": silent[:_MOST_SILENT],
            }
    return {
        "mistakes": mistakes,
        "wrong_factor": {
            name: one.scale for name, one in list(tensors.items())[:_MOST_SILENT] if one.counts
        },
        "no_mistake_shows_in": [n for n, one in tensors.items() if not one.counts][:_MOST_SILENT],
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
        "unit": difference.unit,
        "actual_bits": difference.actual_bits,
        "expected_bits": difference.expected_bits,
    }
