"""What `distcheck scale` prints: a row for each world and order, and what each order comes to."""

import re

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distcheck.errors.shown_text import shown
from distcheck.records import Report
from distcheck.reports import brief, scale, terminal
from distcheck.reports.failures import PrintedCauses
from distcheck.reports.json_report import document_of
from distcheck.reports.wrapping import print_hanging, print_trimmed

_RANKS = re.compile(r" \(rank [\d, ]+\)")  # of many ranks, a list of them hides what is said


def render(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Prints the report: a line for each order, the table, and the first failure of each in full.

    `quiet` leaves the lines of the orders alone; `verbose` adds the report of each world.
    """
    report = shown(report)
    found = scale.curves(document_of(report).cases)
    if not found or report.interrupted:
        terminal.render(report, console, verbose=verbose, quiet=quiet)
        return
    for curve in found:
        verdict = "FAIL" if curve.first_failure else "PASS"
        if verdict == "PASS" and any(point.verdict != "pass" for point in curve.points):
            verdict = "UNKNOWN"
        sentence = f"{report.cases[0].case.strategy}   {curve.order} {curve.comes_to}"
        print_hanging(sentence, console, first=verdict, indent=8)
    if not quiet:
        for sentence in _unknown(found):
            print_hanging(sentence, console, indent=8)
        _print_head(report, found, console)
        print_trimmed(Padding(_table(found), (0, 0, 0, 2)), console)
    if verbose:
        terminal.render(report, console, verbose=True)
    elif not quiet:
        _print_failures(report, found, console)
        if report.saved_to is not None:
            console.print(Text(f"saved  {report.saved_to}"), soft_wrap=True)


def _print_head(report: Report, found: list[scale.Curve], console: Console) -> None:
    case = report.cases[0].case
    sentences = [
        f"{case.workload} {case.dtype}; total batch {case.batch} in every world "
        f"and in the single-process reference, {case.steps} steps, seed {case.seed}",
        f"error and bound: of the {scale.described(found[0].layer)}, where the error comes closest "
        "to its bound or exceeds it most",
        *([f"accepted: {case.accept}"] if case.accept else []),
    ]
    for sentence in sentences:
        print_hanging(sentence, console, indent=2)


def _table(found: list[scale.Curve]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for head in ("order", "world", "", "largest error", "bound", "error / bound"):
        table.add_column(head, no_wrap=True, justify="left" if head in ("order", "") else "right")
    for curve in found:
        for at, point in enumerate(curve.points):
            share = point.share
            table.add_row(
                "" if at else curve.order,
                str(point.world),
                "ok" if point.verdict == "pass" else point.verdict,
                "-" if point.error is None else f"{point.error:.1e}",
                "-" if point.bound is None else f"{point.bound:.1e}",
                "-" if share is None else f"{share:.2g}",
            )
    return table


def _unknown(found: list[scale.Curve]) -> list[str]:
    """Why a world is unknown: one sentence for all orders that have the same reason."""
    orders: dict[tuple[int, str], list[str]] = {}
    for curve in found:
        for point in curve.points:
            if point.verdict == "unknown" and point.reason:
                reason = _RANKS.sub("", point.reason)
                orders.setdefault((point.world, reason), []).append(curve.order)
    return [
        f"world {world} ({', '.join(names)}): {reason}" for (world, reason), names in orders.items()
    ]


def _print_failures(report: Report, found: list[scale.Curve], console: Console) -> None:
    """The first failure of each order, as `verify` shows it."""
    first = {(c.order, c.first_failure.world) for c in found if c.first_failure is not None}
    said = PrintedCauses()
    for one in report.cases:
        order = one.case.backend.partition(":")[2]
        if (order, one.case.world) in first and one.verdict == "fail":
            console.print()
            console.print(Text(f"{order}, world {one.case.world}", style="bold"))
            brief.print_group([one], one.verdict, console, alone=True, said=said)
