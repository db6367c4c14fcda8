"""Prints the results of probing as a table (operations as rows, dtypes as columns, then the
findings), and reads and writes JSON of the schema `distcheck.backends/1`. docs/capabilities.md
explains every key.
"""

import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distcheck.addons.backend_probe.patterns import DTYPES
from distcheck.addons.backend_probe.records import (
    NOT_CALLED,
    BackendResults,
    Baseline,
    ProbeChange,
    ProbedCell,
    VerdictName,
)
from distcheck.errors import ExitCode
from distcheck.errors.shown_text import displayable
from distcheck.records.decoding import read_distcheck_document
from distcheck.reports import json_report
from distcheck.reports.wrapping import print_trimmed

# Text, style and meaning of each verdict.
_SHOWN: dict[VerdictName, tuple[str, str, str]] = {
    "right": ("ok", "green", "verified correct"),
    "refused": ("no", "dim", "refused, by an error on every rank"),
    "wrong": ("BAD", "bold red", "runs, but gives wrong results"),
    "crashes": ("DIED", "bold magenta", "a rank died"),
    "hangs": ("HUNG", "bold magenta", "did not return"),
    "not tried": ("?", "yellow", "not tried"),
}
_FINDINGS: tuple[VerdictName, ...] = ("wrong", "crashes", "hangs", "not tried", "refused")
_FORM_WIDTH = 30


def render_text(sweep: BackendResults, *, width: int) -> str:
    stream = io.StringIO()
    render(sweep, Console(file=stream, width=width, highlight=False, color_system=None))
    return stream.getvalue()


def render(sweep: BackendResults, console: Console, *, verbose: bool = False) -> None:
    """Print the cells of one backend; with `verbose`, every form and each finding separately."""
    sweep = displayable(sweep)
    console.print(Text(_headline(sweep), style="bold"))
    if sweep.missing or sweep.failure:
        text = f"not available here: {sweep.missing}" if sweep.missing else sweep.failure
        console.print(Padding(Text(text), (0, 0, 0, 2)))
    if not sweep.cells:
        return
    console.print()
    print_trimmed(_table(sweep.cells, verbose=verbose), console)
    console.print()
    for line in (*_legend(sweep.cells), *_remarks(sweep.cells, verbose=verbose)):
        console.print(Text(line), style="dim")
    for verdict in _FINDINGS:
        cells = [cell for cell in sweep.cells if cell.verdict == verdict]
        if cells:
            console.print()
            word, _, meaning = _SHOWN[verdict]
            console.print(Text(f"{word:<5}{meaning}", style="bold"))
            for line in _findings(cells, sweep.cells, verbose=verbose):
                console.print(Text(f"  {line}"), soft_wrap=True)


def render_changes(sweeps: Sequence[BackendResults], baseline: Baseline, console: Console) -> None:
    """Print the changes since the baseline; regressions come first."""
    changes = sorted(baseline.changes(sweeps), key=lambda change: change.excused)
    console.print()
    compared, known = baseline.overlap(sweeps)
    console.print(Text(f"{compared:,} of the baseline's {known:,} cells were probed now."))
    if compared and not changes:
        console.print(Text("Each of them ended as in the baseline."))
    for change in changes:
        word = "better than" if change.excused else "worse than"
        cell = change.cell
        text = f"{word} the baseline: {change.backend}, {cell.name}: "
        text += f"{change.before} before, {cell.verdict} now"
        style = "" if change.excused else "bold red"
        console.print(Text(displayable(text), style=style), soft_wrap=True)


def _headline(sweep: BackendResults) -> str:
    about = sweep.environment
    text = f"{sweep.backend} on {sweep.device}, world {sweep.world}"
    text += f", torch {about['torch']}" if "torch" in about else ""
    if not sweep.cells:
        return text
    right = sum(cell.verdict == "right" for cell in sweep.cells)
    return f"{text}: {right:,} of {len(sweep.cells):,} cells verified correct"


def _table(cells: Sequence[ProbedCell], *, verbose: bool) -> Table:
    dtypes = [name for name in DTYPES if any(cell.dtype == name for cell in cells)]
    table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    table.add_column("", max_width=_FORM_WIDTH)
    for name in dtypes or [""]:
        table.add_column(DTYPES[name].short if name else "", no_wrap=True, min_width=4)
    for row, of_row in groupby(cells, key=lambda cell: cell.row):
        lines = _lines_of(list(of_row), dtypes or [""], verbose=verbose)
        for number, (forms, words) in enumerate(lines):
            label = row if number == 0 else ""
            if number or "plain" not in forms:
                label = f"{row} {', '.join(forms)}" if number == 0 else f"  {', '.join(forms)}"
            table.add_row(label, *words)
    return table


def _lines_of(
    cells: Sequence[ProbedCell], dtypes: Sequence[str], *, verbose: bool
) -> list[tuple[list[str], list[Text]]]:
    """Return the table lines of an operation: the plain call first, then the forms whose verdicts
    differ from it. Forms with equal verdicts share a line.
    """
    found: list[tuple[list[str], list[Text]]] = []
    for form, of_form in groupby(cells, key=lambda cell: cell.form):
        verdicts = {cell.dtype: cell.verdict for cell in of_form}
        if "" in verdicts:  # the operation has no dtype: one verdict, in the first column
            verdicts = {dtypes[0]: verdicts[""]}
        words = [Text(*_SHOWN[verdicts[n]][:2]) if n in verdicts else Text() for n in dtypes]
        same = next((forms for forms, other in found if _matches_line(words, other)), None)
        if same is None or verbose:
            found.append(([form], words))
        else:
            same.append(form)
    return found


def _matches_line(words: Sequence[Text], others: Sequence[Text]) -> bool:
    """Return True if a form has the same verdicts as another line in all probed dtypes."""
    pairs = zip(words, others, strict=True)
    return all(word.plain in ("", other.plain) for word, other in pairs)


def _legend(cells: Sequence[ProbedCell]) -> Iterator[str]:
    there = {cell.verdict for cell in cells}
    known = [f"{word}: {meaning}" for v, (word, _, meaning) in _SHOWN.items() if v in there]
    yield "; ".join([*known, "blank: not applicable, or not selected"]) + "."


def _remarks(cells: Sequence[ProbedCell], *, verbose: bool) -> Iterator[str]:
    forms = [form for form in dict.fromkeys(c.form for c in cells) if form != "plain"]
    if forms and not verbose:
        yield (f"Also probed: {', '.join(forms)}. A form has its own line if its result differs.")


def _findings(
    cells: Sequence[ProbedCell], all_cells: Sequence[ProbedCell], *, verbose: bool
) -> Iterator[str]:
    """Yield one line for each operation and form that failed, or each refusal, with the details of
    its first cell.
    """
    if verbose:
        yield from (f"{cell.name}: {cell.detail}" for cell in cells)
        return
    groups: dict[tuple[str, str], list[ProbedCell]] = {}
    for cell in cells:
        what = cell.form if cell.verdict != "refused" else _without_numbers(cell.detail)
        groups.setdefault((cell.operation, what), []).append(cell)
    for alike in groups.values():
        first = alike[0]
        others = [c for c in all_cells if c.operation == first.operation]
        about = ", ".join(filter(None, _extent(alike, others)))
        many = len(alike) > 1 and first.verdict != "refused"
        which = " ".join(filter(None, [first.reduction, first.dtype])) if many else ""
        which = f" ({which})" if which else ""
        yield f"{first.operation}{f' {about}' if about else ''}{which}: {first.detail}"


def _without_numbers(detail: str) -> str:
    """Return the message of a refusal without its numbers, so that messages of different forms and
    dtypes are equal.
    """
    return re.sub(r"\([^()]*\)|\d+", "", detail.removeprefix(NOT_CALLED))


def _extent(alike: Sequence[ProbedCell], others: Sequence[ProbedCell]) -> Iterator[str]:
    """Yield the affected reductions, forms and dtypes of an operation; "all dtypes" if all of them
    are affected.
    """
    for name in ("reduction", "form", "dtype"):
        here = list(dict.fromkeys(getattr(cell, name) for cell in alike))
        everywhere = dict.fromkeys(getattr(cell, name) for cell in others)
        if len(here) == len(everywhere) > 1:
            yield f"all {name}s"
        elif here != ["plain"]:
            yield " ".join(here)


SCHEMA = "distcheck.backends/1"


class _Document(msgspec.Struct, kw_only=True):
    schema: str
    exit_code: int
    backends: list[BackendResults]
    changes: list[dict[str, Any]]


def render_json(
    sweeps: Sequence[BackendResults], changes: Sequence[ProbeChange], exit_code: ExitCode
) -> str:
    document = _Document(
        schema=SCHEMA,
        exit_code=int(exit_code),
        backends=list(sweeps),
        changes=[
            {"backend": c.backend, "device": c.device, "cell": c.cell.name,
             "before": c.before, "now": c.cell.verdict}
            for c in changes
        ],
    )  # fmt: skip
    return json_report.render(msgspec.to_builtins(document))


def read_sweeps(path: Path) -> list[BackendResults]:
    """Read the results of an earlier run from its JSON. Raises UsageError if the file is anything
    else.
    """
    document = read_distcheck_document(
        path, _Document, schema=SCHEMA, name=f"--baseline {path}",
        why="was not written by distcheck backends --json: {error}",
    )  # fmt: skip
    return document.backends


def read_baseline(path: str | None) -> Baseline | None:
    return None if path is None else Baseline(read_sweeps(Path(path)))
