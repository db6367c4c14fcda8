"""Cases of `distcheck scale`: one workload in simulated worlds of several sizes and reduction
orders. This module does not import torch.

All worlds, and the single-process reference, train on the same global batch. They differ only in
how a sum is split, and in its summation order.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from distcheck.addons.simulated import ORDERS
from distcheck.errors import UsageError, did_you_mean
from distcheck.errors.shown_text import displayable
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request, is_launched
from distcheck.records import Case, Report
from distcheck.records.case import with_unique_ids
from distcheck.reports import brief, scale, terminal
from distcheck.reports.failures import PrintedCauses
from distcheck.reports.wrapping import print_hanging, print_trimmed

WORKLOAD = "mlp:small"  # a trace contains every rank's gradients at every step
WORLDS = (2, 8, 64, 256)
STEPS = 2  # the second step starts from the first update
MOST_WORLD = 4096  # Heuristic: threads of one process
_BATCH = 256  # the default of `verify`


def plan_scale(asked: Mapping[str, Any], *, worlds: str | None, orders: str | None) -> list[Case]:
    """Return the cases: for each world size, smallest first, one case per reduction order. `asked`
    holds the remaining options. Raises UsageError or CannotRunError.
    """
    if is_launched():
        raise UsageError("scale starts its own ranks; run it without a launcher")
    if not asked["strategies"]:
        raise UsageError("no strategy was given; pass --strategy NAME or --strategy FILE.py:OBJECT")
    sizes = WORLDS if worlds is None else _parse_sizes(worlds)
    names = ORDERS if orders is None else _parse_orders(orders)
    batch = max(_BATCH, *sizes) if asked["batch"] is None else asked["batch"]
    workload = asked["workload"] or WORKLOAD
    rest = {name: value for name, value in asked.items() if name not in ("batch", "workload")}
    cases = [
        # Without a rerun, which would double the cost of a large world.
        msgspec.structs.replace(case, id=f"{case.id}-{order}", rerun=False)
        for world in sizes
        for order in names
        for case in plan_cases(
            Request(
                **{**rest, "steps": STEPS if rest["steps"] is None else rest["steps"]},
                worlds=(world,),
                workloads=(workload,),
                batch=batch,
                backend=f"simulated:{order}",
                separate=False,
            )
        )
    ]
    return with_unique_ids(cases)


def _parse_sizes(words: str) -> Sequence[int]:
    found = []
    for word in words.split(","):
        if not (word.strip().isascii() and word.strip().isdecimal() and len(word) < 9):
            raise UsageError(
                f"--world {words!r} is not a list of world sizes; pass for example --world "
                f"{','.join(map(str, WORLDS))}"
            )
        found.append(int(word))
        if not 2 <= found[-1] <= MOST_WORLD:
            raise UsageError(
                f"--world: {found[-1]} is out of range; a world takes 2 to {MOST_WORLD} ranks here"
            )
    return sorted(set(found))


def _parse_orders(words: str) -> Sequence[str]:
    found = [word.strip() for word in words.split(",")]
    for word in found:
        if word not in ORDERS:
            raise UsageError(
                f"--orders: unknown order {word!r}{did_you_mean(word, ORDERS)}; known are "
                f"{', '.join(ORDERS)}"
            )
    return list(dict.fromkeys(found))


_RANKS = re.compile(r" \(rank [\d, ]+\)")  # a long list of ranks hides the message


def render(report: Report, console: Console, *, verbose: bool = False, quiet: bool = False) -> None:
    """Print a line for each order, the table of errors, and the first failure of each order in
    full. `quiet` prints only the line for each order; `verbose` adds the report of each world.
    """
    report = displayable(report)
    found = scale.curves(report.cases)
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
        for sentence in _reasons_of_unknown(found):
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
        f"{case.workload} {case.dtype}, {case.steps} steps, seed {case.seed}; the global batch "
        f"size is {case.batch} at every world size and in the single-process reference",
        f"each row shows the element of the {scale.describe_layer(found[0].layer)} with the "
        "largest ratio of error to bound",
        *([f"accepted: {case.accept}"] if case.accept else []),
    ]
    for sentence in sentences:
        print_hanging(sentence, console, indent=2)


def _table(found: list[scale.Curve]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for head in ("order", "world size", "", "error", "bound", "error / bound"):
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


def _reasons_of_unknown(found: list[scale.Curve]) -> list[str]:
    """Return a sentence for each reason why worlds are unknown; orders with the same reason share a
    sentence.
    """
    orders: dict[tuple[int, str], list[str]] = {}
    for curve in found:
        for point in curve.points:
            if point.verdict == "unknown" and point.reason:
                reason = _RANKS.sub("", point.reason)
                orders.setdefault((point.world, reason), []).append(curve.order)
    return [
        f"world size {world} ({', '.join(names)}): {reason}"
        for (world, reason), names in orders.items()
    ]


def _print_failures(report: Report, found: list[scale.Curve], console: Console) -> None:
    """Print the first failure of each order, in the same format as `verify`."""
    first = {(c.order, c.first_failure.world) for c in found if c.first_failure is not None}
    said = PrintedCauses()
    for one in report.cases:
        order = one.case.backend.partition(":")[2]
        if (order, one.case.world) in first and one.verdict == "fail":
            console.print()
            console.print(Text(f"{order}, world size {one.case.world}", style="bold"))
            brief.print_group([one], one.verdict, console, alone=True, said=said)
