"""The document `distcheck.report/1`, which `--json` writes and distcheck reads again, with its JSON
Schema.

docs/report.md explains every key. The cases are the structs of `distcheck.records`. Unknown keys
are preserved. Numbers have bounds, so that a damaged file cannot exhaust the resources of its
reader.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from distcheck.errors import UsageError
from distcheck.errors.shown_text import encodable, without_secrets
from distcheck.records import (
    NOTHING_COMPARED,
    CaseReport,
    ChangesSinceLastPass,
    CheckResult,
    ErrorMap,
    Origin,
    Report,
    RunPlan,
    VerdictName,
)
from distcheck.records.decoding import Count, decode_json, read_bounded
from distcheck.records.mistakes import MISTAKES, MistakeCount, Sensitivity
from distcheck.records.run_facts import ExploredSearch
from distcheck.reports.scale import ScaleEntry, scale_entries
from distcheck.reports.wording import describe_place

SCHEMA = "distcheck.report/1"
# Characters that control a terminal or reverse text; JSON escapes others.
_MOVES = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
MOST_ROWS, MOST_COLUMNS = 64, 128  # of a map; beyond, several tensors or steps share a cell
# Other bitwise checks have a map only if something differs: it would be empty otherwise.
_ALWAYS_MAPPED = ("gradients", "parameters", "agreement")


class PartEntry(msgspec.Struct, kw_only=True):
    """A report that was merged into this one."""

    file: str
    shard: Count
    exit_code: Count
    environment: dict[str, Any]
    made: Origin | None = None


class Document(msgspec.Struct, kw_only=True):
    """A complete report."""

    schema: str = SCHEMA
    verdict: VerdictName
    exit_code: Count
    totals: dict[str, Count] | None = None
    made: Origin | None = None
    environment: dict[str, Any]
    since_green: ChangesSinceLastPass | None = None
    cases: tuple[CaseReport, ...]
    plan: RunPlan | None = None
    left_out: dict[str, str] = {}
    not_shown: list[str] = []
    explored: list[ExploredSearch] = []
    scale: list[ScaleEntry] | UnsetType = UNSET
    parts: list[PartEntry] | UnsetType = UNSET


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the document. Unknown keys are allowed."""
    schema = msgspec.json.schema(Document)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def decode_document(document: Mapping[str, Any]) -> Document:
    """Convert a dictionary to a document. Raises ValidationError if `check_shape` would
    reject it.
    """
    return msgspec.convert(document, Document)


def check_shape(document: dict[str, Any], path: Path | str) -> Document:
    """Convert the dictionary read from `path` to a document. Raises UsageError if a required field
    is missing or has the wrong type.
    """
    try:
        return decode_document(document)
    except (msgspec.ValidationError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}; write the report again") from error


def error_map(result: CheckResult) -> ErrorMap | None:
    """Return the map of errors of a check; None if it would be empty."""
    shares = result.shares
    if not shares or not _shows_something(result):
        return None
    names = list(shares)
    steps = sorted({step for row in shares.values() for step in row})
    tall, wide = -(-len(names) // MOST_ROWS), -(-len(steps) // MOST_COLUMNS)
    rows, labels = [], []
    for first in range(0, len(names), tall):
        together = names[first : first + tall]
        labels.append(together[0] + (f" and {len(together) - 1} more" if together[1:] else ""))
        cells = []
        for at in range(0, len(steps), wide):
            found = [
                float(shares[name][step])
                for name in together
                for step in steps[at : at + wide]
                if step in shares[name]
            ]
            cells.append(max(found, default=None))
        rows.append(_row(cells, in_bits=result.in_bits))
    return ErrorMap(
        kind="bits" if result.in_bits else "bound",
        parameters=tuple(labels),
        steps=tuple(steps[::wide]),
        rows=tuple(rows),
        parameters_per_row=tall,
        steps_per_column=wide,
    )


def _shows_something(result: CheckResult) -> bool:
    if result.check in _ALWAYS_MAPPED:
        return True
    wrong = any(float(share) > 1 for row in result.shares.values() for share in row.values())
    return wrong and result.check not in ("data", "loss")


def _row(cells: list[float | None], *, in_bits: bool) -> str:
    if in_bits:
        return "".join("." if cell is None else "x" if cell else "=" for cell in cells)
    return " ".join("-" if cell is None else f"{cell:.3g}" for cell in cells)


_MOST_DEPTH = 32
_MOST_SILENT = 256  # tensors that are named


def render_json(report: Report) -> str:
    return render(as_document(report))


def render(document: dict[str, Any] | list[Any]) -> str:
    document = without_secrets(document)
    try:
        data = msgspec.json.encode(document)
    except UnicodeEncodeError:  # a file name that is not UTF-8
        data = msgspec.json.encode(encodable(document))
    text = msgspec.json.format(data, indent=2).decode() + "\n"
    return _MOVES.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def read_document(path: Path) -> dict[str, Any]:
    """Read a document from its file. Raises UsageError if it is another kind of file, damaged, or
    of another schema.
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


def as_document(report: Report) -> dict[str, Any]:
    """Return the report as dictionaries and sequences, with secrets masked. docs/report.md explains
    every key.
    """
    built: dict[str, Any] = without_secrets(msgspec.to_builtins(document_of(report)))
    return built


def document_of(report: Report) -> Document:
    cases = tuple(map(_in_document, report.cases))
    return Document(
        verdict=report.verdict,
        exit_code=int(report.exit_code),
        totals=totals_of([case.verdict for case in report.cases], report.left_out),
        made=report.made,
        environment=report.environment,
        since_green=report.since_green,
        cases=cases,
        plan=report.plan,
        left_out=report.left_out,
        not_shown=list(report.not_shown),
        explored=list(report.explored),
        scale=scale_entries(cases) or UNSET,
    )


def totals_of(verdicts: Iterable[str], left_out: Collection[str]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {
        "pass": counts["pass"],
        "unknown": counts["unknown"],
        "fail": counts["fail"],
        "left_out": len(left_out),
    }


def _in_document(report: CaseReport) -> CaseReport:
    return msgspec.structs.replace(report, checks=tuple(map(summarized_result, report.checks)))


def summarized_result(result: CheckResult) -> CheckResult:
    """Return a check result in the form of a document. Lists by tensor are summarized, the place of
    the first divergence is part of the reason, and fields whose contents the reason repeats are
    dropped.
    """
    reason = result.reason
    if result.verdict == "fail" and result.first is not None:
        first = f"first divergence: {describe_place(result.first)}"
        reason = "; ".join(filter(None, [first, reason]))
    return msgspec.structs.replace(
        result, reason=reason, map=error_map(result),
        sensitivity=_sensitivity(result) if result.shown else None,
        lead="", kinds=(), excuse="", shares={}, in_bits=True, shown={},
        insensitive=NOTHING_COMPARED,
    )  # fmt: skip


def _sensitivity(result: CheckResult) -> Sensitivity:
    tensors = result.shown
    mistakes = {}
    for name in MISTAKES:
        possible = {tensor: one.shown[name] for tensor, one in tensors.items() if name in one.shown}
        if possible:
            most = max(map(len, possible.values()))
            silent = [tensor for tensor, ranks in possible.items() if len(ranks) < max(1, most)]
            mistakes[name] = MistakeCount(
                tensors=len(possible) - len(silent),
                of=len(possible),
                not_in=tuple(silent[:_MOST_SILENT]),
            )
    return Sensitivity(
        mistakes=mistakes,
        wrong_factor={
            name: one.scale for name, one in list(tensors.items())[:_MOST_SILENT] if one.counts
        },
        no_mistake_shows_in=tuple(n for n, one in tensors.items() if not one.counts)[:_MOST_SILENT],
    )
