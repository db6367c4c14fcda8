"""Renders a report for the terminal: the verdict comes first."""

import io
import os
import re
import shutil
from collections.abc import Sequence
from itertools import groupby
from typing import IO, Any, cast

import msgspec
from markupsafe import escape
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distcheck.errors.shown_text import FilteredStream, displayable, without_workflow_commands
from distcheck.judge.checks.merging import earliest_failure, merge_results
from distcheck.records import CaseReport, CheckResult, Compared, Report, VerdictName, merge_verdicts
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import LAYERS, check_with_layer, layer_label
from distcheck.records.ledger import HEADS, Ledger, table_of
from distcheck.records.mistakes import SENSITIVITY
from distcheck.reports import brief, json_report
from distcheck.reports.failures import PrintedCauses, print_failure
from distcheck.reports.wording import (
    STYLE,
    describe_accepted,
    describe_place,
    describe_search,
    describe_sensitivity,
    describe_worst,
    format_count,
    most_telling_first,
    sentence_on_modules,
)
from distcheck.reports.wrapping import VERDICT, print_hanging, print_trimmed, print_verdict

_MOST_NAMED = 6  # workloads in a headline
# Columns of coverage, the most that fit; the verdict always fits.
_COLUMNS = (("tensors", "ranks", "steps", "elements"), ("elements",), ())


def console_for(stream: IO[str] | None = None, *, width: int | None = None) -> Console:
    """Return a console that respects NO_COLOR and the width of the terminal; 100 columns if there
    is no terminal.
    """
    filtered = cast("IO[str]", FilteredStream(stream))
    console = Console(file=filtered, width=width, highlight=False, soft_wrap=False)
    if width is None and not console.is_terminal:
        asked = os.environ.get("COLUMNS", "")
        console.width = int(asked) if re.fullmatch(r"[1-9][0-9]{1,3}", asked) else 100
    return console


def render_failure(report: Report) -> str:
    """Return the error message for `Report.raise_for_verdict`."""
    return f"{summarize(report)}\n\n{render_text(report, width=100)}"


def render_text(report: Report, *, width: int, verbose: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None)
    render(report, console, verbose=verbose)
    return without_workflow_commands(stream.getvalue())


def summarize(report: Report) -> str:
    """Return the verdict in one line, with the first failure and its place, or an error while
    saving the run.
    """
    report = displayable(report)
    failed = most_telling_first([c for c in report.cases if c.verdict != "pass"])
    case = next(iter(failed), report.cases[0])
    about = case.case
    text = f"{case.verdict.upper()} {about.strategy}, world {about.world}, {about.workload}"
    text += f" {about.dtype}"
    if case.diagnosis:
        text += f": {case.diagnosis[0].cause}"
    if case.verdict == "pass" and report.save_error:
        return f"{text}; {report.save_error}"
    if case.ranks_failed:
        first = next(o for o in case.outcomes if o.outcome != RankEnd.FINISHED)
        return f"{text}: rank {first.rank} {RankEnd(first.outcome).in_words()}"
    result = earliest_failure(case.checks)
    if result is None or result.first is None:
        return text
    return f"{text}: {check_with_layer(result.check, result.layer)}, {describe_place(result.first)}"


def render(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print the report: verdict, cause and repair in about twelve lines for each strategy and
    world. With `verbose`, print every table in full; with `quiet`, only the lines with verdicts.
    """
    report = displayable(report)
    judged = [case for case in report.cases if not case.unfinished]
    groups = [list(group) for _, group in groupby(judged, key=lambda case: case.case.sibling_key)]
    if verbose and report.environment and judged:
        print_trimmed(Text(_environment_line(report), style="dim"), console)
    said = PrintedCauses()
    for cases in groups:
        verdict = merge_verdicts([case.verdict for case in cases])
        if quiet:
            brief.print_headline(cases, verdict, console)
        elif verbose:
            _print_headline(cases, verdict, report, console)
            _print_group(cases, console)
        else:
            brief.print_group(cases, verdict, console, alone=len(groups) == 1, said=said)
    if len(judged) < len(report.cases):
        console.print(_interruption(report), soft_wrap=True)
    if not quiet:
        _print_end(report, console, verbose=verbose, judged=bool(judged), cut=said.cut)


def _interruption(report: Report) -> Text:
    left = [case.case for case in report.cases if case.unfinished]
    names = list(dict.fromkeys(f"{case.strategy}, world {case.world}" for case in left))
    of = "; ".join(names[:_MOST_NAMED])
    of += f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    text = Text(f"{'UNKNOWN':<{VERDICT}}", style=STYLE["unknown"])
    count_ = f"{len(left)} of {len(report.cases)} cases"
    return text.append(f"interrupted: {count_} were not judged: {of}", style="default")


def _environment_line(report: Report) -> str:
    about = report.environment
    threads = "1 thread" if about.get("threads") in (1, None) else f"{about['threads']} threads"
    return (
        f"distcheck {about.get('distcheck')}, torch {about.get('torch')}, "
        f"{about.get('backend')} on {about.get('device')}, {threads} per rank, "
        f"{about.get('cpu')}{', under ' + about['launcher'] if 'launcher' in about else ''}"
    )


def _print_headline(
    cases: Sequence[CaseReport], verdict: VerdictName, report: Report, console: Console
) -> None:
    """Print the verdict and its subject. At any width, the first line can be searched for."""
    case = cases[0].case
    dtypes: dict[tuple[str, int], dict[str, None]] = {}
    for c in cases:
        dtypes.setdefault((c.case.workload, c.case.steps), {})[c.case.dtype] = None
    alike = len({steps for _, steps in dtypes}) == 1
    names = ", ".join(
        f"{workload} {'+'.join(found)}{'' if alike else f' ({steps} steps)'}"
        for (workload, steps), found in [*dtypes.items()][:_MOST_NAMED]
    )
    if len(dtypes) > _MOST_NAMED:
        names += f" and {len(dtypes) - _MOST_NAMED} more"
    steps = f"{case.steps} steps, " if alike else ""
    of = f"{case.strategy}, world {case.world}"
    if report.environment.get("backend") not in (None, case.backend):
        of += f" on {case.backend}"
    sentence = f"{of}: {names}; batch {case.batch}, {steps}seed {case.seed}"
    print_verdict(sentence, verdict, console, bold=of)
    for one in dict.fromkeys(one for c in cases for one in c.remarks):
        said = f"warning: {one.cause}: {one.evidence}; {one.suggestion}"
        print_hanging(said, console, indent=2, style=STYLE["unknown"])


def _print_group(cases: Sequence[CaseReport], console: Console) -> None:
    for shown in _COLUMNS:
        table = _table(cases, shown)
        if console.measure(table).maximum <= console.width - 2:
            break
    if table.row_count:
        print_trimmed(Padding(table, (0, 0, 0, 2)), console)
    for sentence in _remarks(cases):
        print_hanging(sentence, console, indent=2)
    if (found := next((case.ledger for case in cases if case.ledger), None)) is not None:
        print_hanging(f"collectives of {found.in_words()}", console, indent=2)
        print_trimmed(Padding(_ledger(found), (0, 0, 0, 2)), console)
    for case in most_telling_first([c for c in cases if c.verdict != "pass" and c.replay]):
        print_failure(case, console)


def _table(cases: Sequence[CaseReport], shown: Sequence[str]) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim"
    )
    table.add_column("check", no_wrap=True)
    table.add_column("comparison", no_wrap=True)
    table.add_column("", no_wrap=True)
    for what in shown:
        table.add_column(what, no_wrap=True, justify="right")
    table.add_column("max error")
    table.add_column("bound")
    last = ""
    for result in _rows(cases):
        table.add_row(
            result.check if result.check != last else "",
            layer_label(result.layer),
            Text("ok" if result.verdict == "pass" else result.verdict, STYLE[result.verdict]),
            *_format_counts(result.compared, shown),
            *describe_worst(result),
        )
        last = result.check
    return table


def _ledger(ledger: Ledger) -> Table:
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim"
    )
    for head in HEADS:
        right = head in ("calls", "bytes")
        table.add_column(head, no_wrap=True, justify="right" if right else "left")
    for row in table_of(ledger):
        table.add_row(*map(Text, row))
    return table


def _format_counts(compared: Compared, shown: Sequence[str]) -> list[str]:
    """Format numbers for the table; zero as a dash."""
    numbers = [getattr(compared, what) for what in shown]
    return [format_count(n) if n else "-" for n in numbers]


def _rows(cases: Sequence[CaseReport]) -> list[CheckResult]:
    found: dict[tuple[str, str], list[CheckResult]] = {}
    for case in cases:
        for result in case.checks:
            found.setdefault((result.check, result.layer), []).append(result)
    order = {check: place for place, check in enumerate(dict.fromkeys(c for c, _ in found))}
    rows = []
    for _, results in sorted(found.items(), key=lambda item: order[item[0][0]]):
        merged = merge_results(results)
        total = Compared(
            tensors=sum(r.compared.tensors for r in results),
            elements=merged.compared.elements,
            ranks=merged.compared.ranks,
            steps=max(r.compared.steps for r in results),
        )
        rows.append(msgspec.structs.replace(merged, compared=total))
    return rows


def _remarks(cases: Sequence[CaseReport]) -> list[str]:
    """Return the notes on cases, and the messages of passing checks, without duplicates."""
    notes = [describe_accepted(case.accepted) for case in cases if case.accepted is not None]
    notes += [
        f"module: {sentence_on_modules(case.modules)}" for case in cases if case.modules is not None
    ]
    notes += [f"note: {note}" for case in cases for note in case.notes]
    said = [
        f"{check_with_layer(result.check, result.layer)}: {result.reason}"
        for case in cases
        for result in case.checks
        if result.verdict == "pass" and result.reason and result.check != SENSITIVITY
    ]
    passed = all(case.verdict == "pass" for case in cases)
    would_show = describe_sensitivity(cases) if passed else ()
    return list(dict.fromkeys([*notes, *said, *would_show]))


def _print_legend(report: Report, console: Console) -> None:
    used = {result.layer for case in report.cases for result in case.checks}
    shown = {name: layer.about for name, layer in LAYERS.items() if name in used}
    if shown:
        console.print(Text("Comparisons:", style="dim"))
    width = max(map(len, shown), default=0) + 4
    for name, about in shown.items():
        print_hanging(about, console, indent=width, first=f"  {name}", style="dim")


def _print_end(report: Report, console: Console, *, verbose: bool, judged: bool, cut: bool) -> None:
    if judged and verbose:
        console.print()
    for explored in report.explored:
        print_hanging(describe_search(explored), console, indent=0)
    if judged and verbose:
        _print_legend(report, console)
        if report.verdict == "pass" and report.not_shown:
            shown = f"Not covered by this pass: {'; '.join(report.not_shown)}."
            print_hanging(shown, console, indent=0, style="dim")
    if report.plan is not None and report.plan.shard:
        part = f"part {report.plan.shard} of {report.plan.shards}"
        cells = f"{len(report.cases) + len(report.left_out)} of {len(report.plan.cases)}"
        console.print(
            Text(
                f"{part}: {cells} planned cases; run distcheck merge to check that the other "
                "parts ran"
            ),
            soft_wrap=True,
        )
    brief.print_end(report, console, verbose=verbose, cut=cut)


_NARROWEST = 60  # columns
_HEIGHT = 640  # pixels, resizable


def terminal_text(report: Report) -> str:
    """Return the output of the command line, at the width of the terminal."""
    if not report.cases:
        return report.given_up or f"{report.verdict}: no case was judged"
    width = shutil.get_terminal_size((100, 24)).columns
    return render_text(report, width=max(width, _NARROWEST)).rstrip("\n")


def json_document(report: Report) -> dict[str, Any]:
    """Return the document of `--json`, parsed."""
    read: dict[str, Any] = msgspec.json.decode(json_report.render_json(report))
    return read


def html_for_notebook(report: Report) -> str:
    """Return the HTML page in a frame, which separates its styles from those of the notebook. The
    frame has the attribute `sandbox` without permissions, so that no script runs, whatever the
    report contains.
    """
    from distcheck.reports import html_report  # slow import of templates

    page = escape(html_report.render(json_report.as_document(report)))
    style = f"width: 100%; height: {_HEIGHT}px; border: 0; resize: vertical"
    return f'<iframe sandbox title="distcheck report" style="{style}" srcdoc="{page}"></iframe>'
