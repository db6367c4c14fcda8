"""Renders a report for GitHub Actions: annotations as workflow commands, and the summary of a step.

GitHub shows 10 errors and 10 warnings per step, and accepts a summary of at most 1 MiB. The number
of omitted items is printed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distcheck.errors.shown_text import displayable
from distcheck.records import CaseReport
from distcheck.reports.findings import (
    COUNTED,
    FailureSummary,
    cell_name,
    describe_origin,
    failure_summary,
    source_place,
)
from distcheck.reports.json_report import decode_document
from distcheck.reports.wording import describe_search

MOST_SUMMARY_BYTES = 1 << 20
_MOST_ANNOTATIONS = 10  # of each kind
_MOST_MESSAGE = 4000  # characters; GitHub cuts at 64 KiB
_MOST_DETAIL = 6000
_MARKS = {"pass": "✅ pass", "unknown": "❔ unknown", "fail": "❌ fail"}


def annotations(document: Mapping[str, Any], root: Path) -> list[str]:
    """Return an annotation for each cell that did not pass, at the file and line of its cause or
    strategy, relative to `root`: an error if it failed, a warning if it is unknown, a notice for a
    pass with a warning.
    """
    every = decode_document(displayable(document)).cases
    lines = []
    for verdict, command in (("fail", "error"), ("unknown", "warning"), ("pass", "notice")):
        cases = [case for case in every if case.verdict == verdict]
        cases = [case for case in cases if verdict != "pass" or case.remarks]
        # The last place is for the number of omitted ones.
        named = len(cases) if len(cases) <= _MOST_ANNOTATIONS else _MOST_ANNOTATIONS - 1
        lines += [_annotation(command, case, root) for case in cases[:named]]
        if len(cases) > named:
            left = f"{len(cases) - named} more cases {COUNTED[verdict]}"
            text = f"{left.replace('unknown', 'are unknown')}; the summary and the JSON list them"
            lines.append(f"::{command} title=distcheck::{_data(text)}")
    return lines


def error(message: str) -> str:
    """Return the annotation for a run without a verdict."""
    return f"::error title=distcheck::{_data(_shorten(displayable(message), _MOST_MESSAGE))}"


def _annotation(command: str, case: CaseReport, root: Path) -> str:
    found = failure_summary(case)
    remarks = case.remarks
    parts = [
        *(f"cause: {cause}" for cause in found.causes),
        *(f"warning: {d.cause}: {d.evidence}; {d.suggestion}" for d in remarks),
        *(f"try: {suggestion}" for suggestion in found.suggestions),
        found.headline if found.ranks else "",
        f"first: {found.first}" if found.first else "",
        found.headline if case.verdict != "pass" and not found.first else "",
        f"where: {found.where}" if found.where else "",
        f"replay: {found.replay}" if found.replay else "",
    ]
    first = next(iter([*case.diagnosis, *remarks]), None)
    named = f" ({first.cause})" if first else ""
    title = f"distcheck: {case.verdict}{named}: {case.case.strategy}, {cell_name(case.case)}"
    file, line = source_place(case, root)
    place = [f"file={_property(file)}", f"line={line}"] if file else []
    message = "\n".join(dict.fromkeys(part for part in parts if part))
    words = ",".join([*place, f"title={_property(title)}"])
    return f"::{command} {words}::{_data(_shorten(message, _MOST_MESSAGE))}"


def step_summary(document: Mapping[str, Any], *, room_bytes: int = MOST_SUMMARY_BYTES) -> str:
    """Return Markdown of at most `room_bytes`: the verdict, a table of cells, and each failure."""
    found = decode_document(displayable(document))
    cases = sorted(found.cases, key=lambda case: ("fail", "unknown", "pass").index(
        case.verdict))  # fmt: skip
    count = {verdict: sum(c.verdict == verdict for c in cases) for verdict in _MARKS}
    told = ", ".join(f"{number} {COUNTED[verdict]}" for verdict, number in count.items() if number)
    told += f", {len(found.left_out)} left out" if found.left_out else ""
    head = f"## distcheck: {_MARKS[found.verdict]}\n\n{told or 'nothing was verified'}\n\n"
    head += "".join(f"{_escape_markdown(describe_search(one))}\n\n" for one in found.explored)
    details = [_details(case) for case in cases if case.verdict != "pass"]
    rows = [_table_row(case) for case in cases]
    table = ["| verdict | strategy | case | cause |\n|---|---|---|---|\n", *rows]
    made = describe_origin(found.made)
    end = [f"\n{_escape_markdown(made)}\n"] if made else []
    return _join_fitting([head, *table, "\n", *details, *end], room_bytes)


def _table_row(case: CaseReport) -> str:
    found = failure_summary(case)
    said = next(iter(found.causes), found.headline)
    what = "" if case.verdict == "pass" else _shorten(said, 200)
    words = (_MARKS[case.verdict], case.case.strategy, cell_name(case.case), what)
    return f"| {' | '.join(map(_escape_markdown, words))} |\n"


def _details(case: CaseReport) -> str:
    found = failure_summary(case)
    title = f"{case.verdict}: {case.case.strategy}, {cell_name(case.case)}"
    text = f"### {_escape_markdown(title)}\n\n"
    for label, lines in _labeled_texts(found):
        text += f"**{label}**\n\n{_code_block(_shorten(lines, _MOST_DETAIL))}\n"
    return text


def _labeled_texts(found: FailureSummary) -> list[tuple[str, str]]:
    told = [
        ("cause", "\n".join(found.causes)),
        ("try", "\n".join(found.suggestions)),
        ("first", found.first),
        ("where", found.where),
        ("ranks", "\n\n".join(f"{rank}\n{detail}".strip() for rank, detail in found.ranks)),
        ("replay", found.replay),
    ]
    return [(label, text) for label, text in told if text]


def _join_fitting(pieces: Sequence[str], room_bytes: int) -> str:
    """Join as many complete pieces as fit, followed by the number of omitted ones."""
    closing = "\n{} more lines do not fit here; the JSON report has all of them.\n"
    room = room_bytes - len(closing.encode()) - 10
    taken: list[str] = []
    spent = 0
    for n, piece in enumerate(pieces):
        spent += len(piece.encode("utf-8", "replace"))
        if spent > room:
            rest = closing.format(len(pieces) - n)
            return "".join(taken) + rest if len(rest.encode()) <= room_bytes else ""
        taken.append(piece)
    return "".join(taken)


def _code_block(text: str) -> str:
    ticks = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"{fence}text\n{text}\n{fence}\n"


def _escape_markdown(text: str) -> str:
    text = re.sub(r"([\\`*_{}\[\]<>|#~!@$])", r"\\\1", " ".join(text.split()))
    return text.replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\@", "&#64;")


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _data(text: str) -> str:
    """Escape the text of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
