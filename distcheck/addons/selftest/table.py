"""Prints the detection table on the terminal, and as JSON of the schema `distcheck.selftest/1`."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distcheck.addons.selftest.records import (
    DetectionCounts,
    Naming,
    SelftestVerdict,
    Verdict,
    format_checks,
)
from distcheck.errors.shown_text import displayable
from distcheck.reports import json_report
from distcheck.reports.wrapping import print_trimmed

SCHEMA = "distcheck.selftest/1"
_STYLES: dict[Verdict, str] = {
    "caught": "green",
    "passed": "green",
    "left out": "dim",
    "missed": "bold red",
    "false positive": "bold red",
    "unknown": "bold yellow",
}
_NAMING: dict[Naming, str] = {
    "right": "right",
    "wrong": "WRONG",
    "unexplained": "",  # the cause itself is shown
    "-": "",
}


class SelftestResults(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a selftest. After an interrupt they are incomplete."""

    backend: str = "gloo"
    device: str = "cpu"
    rows: tuple[SelftestVerdict, ...]
    counts: DetectionCounts
    environment: dict[str, Any]
    elsewhere: tuple[tuple[str, str], ...] = ()
    interrupted: bool = False
    seconds: float = 0.0


def render(found: SelftestResults, console: Console, *, verbose: bool = False) -> None:
    """Print the mutants grouped by file, one line for each correct strategy, and the totals."""
    found = displayable(found)
    about = found.environment
    console.print(
        Text(
            f"distcheck {about.get('distcheck')}, torch {about.get('torch')}, "
            f"{found.backend} on {found.device}, {about.get('threads')} thread per rank, "
            f"{about.get('gpu') or about.get('cpu')}"
        ),
        style="dim", soft_wrap=True,
    )  # fmt: skip
    mutants = [row for row in found.rows if row.kind == "mutant"]
    correct = [row for row in found.rows if row.kind == "correct"]
    if mutants:
        print_trimmed(_mutant_table(mutants), console)
    if correct:
        print_trimmed(_correct_table(correct, verbose=verbose), console)
    for row in found.rows:
        if not row.good or (row.detail and row.verdict != "left out"):
            _print_surprise(row, console)
    for line in format_totals(found):
        console.print(Text(line), soft_wrap=True)


def format_totals(found: SelftestResults) -> Iterator[str]:
    counts = found.counts
    if counts.planted:
        yield (
            f"mutants   {counts.planted} planted: {counts.caught} caught, {counts.missed} missed; "
            f"{counts.named_right} named correctly, {counts.named_wrong} named incorrectly, "
            f"{counts.unexplained} unexplained"
        )
    if counts.correct:
        yield (
            f"correct   {counts.correct} cases: {counts.passed} passed, "
            f"{counts.false_positives} false positives"
        )
    out = [(row.name, row.detail) for row in found.rows if row.verdict == "left out"]
    for name, why in dict.fromkeys(out):
        yield f"          {name} is excluded: {why}"
    for name, why in found.elsewhere:
        yield f"          {name} is not included: it {why}"
    if counts.unknown:
        yield f"unknown   {counts.unknown} planned cases have no verdict"
    yield f"time      {found.seconds:.0f} s"


def render_json(found: SelftestResults) -> str:
    """Return the table as JSON. docs/selftest.md explains every key."""
    document = {
        "schema": SCHEMA,
        "exit_code": 130 if found.interrupted else int(found.counts.exit_code),
        "interrupted": found.interrupted,
        "backend": found.backend,
        "device": found.device,
        "environment": found.environment,
        "counts": found.counts,
        "rows": found.rows,
        "elsewhere": dict(found.elsewhere),
        "seconds": round(found.seconds, 1),
    }
    return json_report.render(document)


def _mutant_table(rows: Sequence[SelftestVerdict]) -> Table:
    table = _table("mutant", "", "failed checks", "reported cause", "")
    for file, group in groupby(rows, key=lambda row: row.file):
        table.add_row(Text(file, style="bold"))
        for row in group:
            naming = Text(_NAMING[row.naming], style="bold red" if row.naming == "wrong" else "")
            checks = format_checks(row.checks) + ("" if row.as_listed else " (not as listed)")
            table.add_row(
                f"  {row.name}", _verdict(row), Text(checks), Text(", ".join(row.causes)), naming
            )
    return table


def _correct_table(rows: Sequence[SelftestVerdict], *, verbose: bool) -> Table:
    table = _table("correct", "", "")
    for strategy, group in groupby(rows, key=lambda row: row.file):
        cases = list(group)
        if verbose or not all(row.good for row in cases):
            for row in cases:
                table.add_row(f"  {row.name}", _verdict(row), Text(format_checks(row.checks)))
        else:
            passed = [row for row in cases if row.verdict == "passed"]
            rest = f", {len(cases) - len(passed)} left out" if len(passed) < len(cases) else ""
            first = (passed or cases)[0]
            table.add_row(f"  {strategy}", _verdict(first), f"{len(passed)} cases{rest}")
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, no_wrap=number < 2, overflow="fold")
    return table


def _verdict(row: SelftestVerdict) -> Text:
    word = row.verdict if row.good else row.verdict.upper()
    return Text(word, style=_STYLES[row.verdict])


def _print_surprise(row: SelftestVerdict, console: Console) -> None:
    words: Iterable[str] = filter(None, [row.detail, row.replay])
    console.print(Text(f"{row.name}: {row.verdict}, named {row.naming}"), style="bold")
    for word in words:
        console.print(Text(f"  {word}"), soft_wrap=True)  # unwrapped, so that it can be copied
