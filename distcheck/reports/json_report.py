"""The report as `distcheck.report/1`, for gates and dashboards."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from distcheck.errors import UsageError
from distcheck.errors.shown_text import encodable, without_secrets
from distcheck.records import CaseReport, CheckResult, Outcome, Report
from distcheck.records.decoding import decode_json, read_bounded
from distcheck.records.exit_status import RankEnd
from distcheck.records.mistakes import MISTAKES
from distcheck.records.picture_sums import NONFINITE, Aggregates, Losses
from distcheck.reports import scale
from distcheck.reports.document import (
    SCHEMA,
    CaseEntry,
    CheckEntry,
    DigestsEntry,
    Document,
    ElementEntry,
    HistogramEntry,
    LossesEntry,
    MapEntry,
    MistakeEntry,
    RankEntry,
    SensitivityEntry,
    check_shape,
    entry_from_sources,
)
from distcheck.reports.wording import describe_place

# Characters that control a terminal or reverse text; JSON escapes others.
_MOVES = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
MOST_ROWS, MOST_COLUMNS = 64, 128  # of a map; beyond, several tensors or steps share a cell
_MOST_POINTS = 256  # of a series over steps
# Other bitwise checks have a map only if something differs: it would be empty otherwise.
_ALWAYS_MAPPED = ("gradients", "parameters", "agreement")


def as_entries(result: CheckResult) -> dict[str, Any]:
    """Return the optional entries of a check, by key, without empty ones."""
    sums = result.aggregates
    keys: dict[str, Any] = {}
    if sums.shares and _shows_something(result):
        keys["map"] = _map(sums)
    if sums.ulps and (result.check == "gradients" or set(sums.ulps) != {0}):
        keys["ulp"] = _histogram(sums)
    if sums.elements:
        keys["elements"] = [entry_from_sources(ElementEntry, one) for one in sums.elements]
    if sums.losses:
        keys["loss"] = _losses(sums)
    if sums.digests:
        keys["digests"] = _digests(sums)
    return keys


def _shows_something(result: CheckResult) -> bool:
    sums = result.aggregates
    if result.check in _ALWAYS_MAPPED:
        return True
    wrong = any(float(share) > 1 for row in sums.shares.values() for share in row.values())
    return wrong and result.check not in ("data", "loss")


def _map(sums: Aggregates) -> MapEntry:
    names = list(sums.shares)
    steps = sorted({step for row in sums.shares.values() for step in row})
    tall, wide = -(-len(names) // MOST_ROWS), -(-len(steps) // MOST_COLUMNS)
    rows, labels = [], []
    for first in range(0, len(names), tall):
        together = names[first : first + tall]
        labels.append(together[0] + (f" and {len(together) - 1} more" if together[1:] else ""))
        cells = []
        for at in range(0, len(steps), wide):
            found = [
                float(sums.shares[name][step])
                for name in together
                for step in steps[at : at + wide]
                if step in sums.shares[name]
            ]
            cells.append(max(found, default=None))
        rows.append(_row(cells, in_bits=sums.in_bits))
    return MapEntry(
        kind="bits" if sums.in_bits else "bound",
        parameters=labels,
        steps=steps[::wide],
        rows=rows,
        parameters_per_row=tall,
        steps_per_column=wide,
    )


def _row(cells: list[float | None], *, in_bits: bool) -> str:
    if in_bits:
        return "".join("." if cell is None else "x" if cell else "=" for cell in cells)
    return " ".join("-" if cell is None else f"{cell:.3g}" for cell in cells)


def _histogram(sums: Aggregates) -> HistogramEntry:
    bins = {b: count for b, count in sorted(sums.ulps.items()) if b != NONFINITE}
    return HistogramEntry(
        bins={str(b): count for b, count in bins.items()}, nonfinite=sums.ulps.get(NONFINITE, 0)
    )


def _losses(sums: Aggregates) -> LossesEntry:
    """Return losses; with very many steps, the worst of each interval."""
    every = sorted(sums.losses)
    stretch = -(-len(every) // _MOST_POINTS)
    steps = [
        max(every[at : at + stretch], key=lambda step: _loss_error(sums.losses[step]))
        for at in range(0, len(every), stretch)
    ]
    points = [sums.losses[step] for step in steps]
    return LossesEntry(
        steps=steps,
        ranks=[list(of_rank) for of_rank in zip(*(p.ranks for p in points), strict=True)],
        mean=[p.mean for p in points],
        expected=[p.expected for p in points],
        bound=[p.bound for p in points],
    )


def _loss_error(losses: Losses) -> float:
    off = abs(float(losses.mean) - float(losses.expected))
    return math.inf if math.isnan(off) else off


def _digests(sums: Aggregates) -> DigestsEntry:
    """Return, per kind and step, groups of ranks with equal bits. With very many steps, only those
    with disagreement, the first and the last.
    """
    steps = sorted(sums.digests)
    if len(steps) > _MOST_POINTS:
        apart = [s for s in steps if any(len(set(d)) > 1 for d in sums.digests[s].values())]
        steps = sorted({steps[0], steps[-1], *apart[: _MOST_POINTS // 2]})
    return DigestsEntry(
        steps=steps,
        ranks=len(next(iter(sums.digests[steps[0]].values()))),
        kinds={
            kind: [_groups(sums.digests[step][kind]) for step in steps]
            for kind in sums.digests[steps[0]]
        },
    )


def _groups(digests: tuple[str, ...]) -> str:
    """Format groups of equal bits: "0-2,5=07306cef 3=9d1c44a0"; one entry if all agree."""
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest or "-", []).append(rank)
    return " ".join(f"{_spans(of_digest)}={digest}" for digest, of_digest in ranks.items())


def _spans(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


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
    """Read a document from its file. Raises UsageError if it is another file, damaged, or of
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


def as_document(report: Report) -> dict[str, Any]:
    """Return the report as plain dictionaries and sequences, without secrets; docs/report.md
    explains every key.
    """
    built: dict[str, Any] = without_secrets(msgspec.to_builtins(document_of(report)))
    return built


def document_of(report: Report) -> Document:
    cases = [_case(case) for case in report.cases]
    return entry_from_sources(
        Document,
        report,
        exit_code=int(report.exit_code),
        totals=totals_of([case.verdict for case in report.cases], report.left_out),
        cases=cases,
        not_shown=list(report.not_shown),
        explored=list(report.explored),
        scale=scale.as_rows(cases) or UNSET,
    )


def totals_of(verdicts: Iterable[str], left_out: Collection[str]) -> dict[str, int]:
    counts = Counter(verdicts)
    return {
        "pass": counts["pass"],
        "unknown": counts["unknown"],
        "fail": counts["fail"],
        "left_out": len(left_out),
    }


def _case(report: CaseReport) -> CaseEntry:
    called = report.case.adaptation
    return entry_from_sources(
        CaseEntry,
        report,
        report.case,
        called,
        arguments=dict(called.arguments),
        variables=dict(called.variables),
        without_data=list(called.without_data),
        outcomes=[_rank(outcome) for outcome in report.outcomes],
        checks=[_check(result) for result in report.checks],
        diagnosis=list(report.diagnosis),
        where=report.where or UNSET,
        remarks=list(report.remarks) or UNSET,
        modules=report.modules or UNSET,
        command=report.case.command_line,
        notes=list(report.notes),
    )


def _rank(outcome: Outcome) -> RankEntry:
    kept = outcome.outcome != RankEnd.FINISHED
    return entry_from_sources(
        RankEntry,
        outcome,
        lost_peer=outcome.lost_peer if kept else UNSET,
        sizes_differ=outcome.sizes_differ if kept else UNSET,
        proven=outcome.proven or UNSET,
        why=outcome.why or UNSET,
        collectives=list(outcome.collectives) or UNSET,
    )


def _check(result: CheckResult) -> CheckEntry:
    reason = result.reason
    if result.verdict == "fail" and result.first is not None:
        first = f"first divergence: {describe_place(result.first)}"
        reason = "; ".join(filter(None, [first, reason]))
    return entry_from_sources(
        CheckEntry,
        result,
        reason=reason,
        defect=result.defect or UNSET,
        sensitivity=_sensitivity(result) if result.shown else UNSET,
        **as_entries(result),
    )


def _sensitivity(result: CheckResult) -> SensitivityEntry:
    tensors = result.shown
    mistakes = {}
    for name in MISTAKES:
        possible = {tensor: one.shown[name] for tensor, one in tensors.items() if name in one.shown}
        if possible:
            most = max(map(len, possible.values()))
            silent = [tensor for tensor, ranks in possible.items() if len(ranks) < max(1, most)]
            mistakes[name] = MistakeEntry(
                tensors=len(possible) - len(silent),
                of=len(possible),
                not_in=silent[:_MOST_SILENT],
            )
    return SensitivityEntry(
        mistakes=mistakes,
        wrong_factor={
            name: one.scale for name, one in list(tensors.items())[:_MOST_SILENT] if one.counts
        },
        no_mistake_shows_in=[n for n, one in tensors.items() if not one.counts][:_MOST_SILENT],
    )
