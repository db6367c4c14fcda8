"""A comparison for a person."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.errors.shown_text import shown
from distcheck.records import Difference
from distcheck.reports.wording import STYLE, describe_place, show


def render(comparison: RunsComparison, console: Console, *, quiet: bool = False) -> None:
    """What has changed around the runs, once; then every case, in full where bits differ."""
    comparison = shown(comparison)
    known = [case.changes for case in comparison.cases if case.bits != "not compared"]
    common = [change for change in known[0] if all(change in own for own in known)] if known else []
    if not quiet and known:
        lines = [str(change) for change in common] or ["no recorded setting changed"]
        console.print(Text(f"changed between the runs: {'; '.join(lines)}"), style="dim")
    for case in comparison.cases:
        text = Text()
        text.append(f"{case.verdict.upper():<8}", style=STYLE[case.verdict])
        text.append(case.id, style="bold")
        text.append(f": bits {case.bits}; {case.reason}")
        console.print(text, soft_wrap=True)
        if quiet:
            continue
        for label, sentence in _details(case):
            console.print(Padding(Text(f"{label:<8}{sentence}"), (0, 0, 0, 8)))
        for change in case.changes:
            if change not in common:
                console.print(Padding(Text(f"changed {change}"), (0, 0, 0, 8)))
    if comparison.saved_to is not None and not quiet:
        console.print(Text(f"saved: {comparison.saved_to}"), soft_wrap=True)


def _details(case: CaseComparison) -> list[tuple[str, str]]:
    found = case.found
    if found.first is None:
        return []
    lines = [("first", f"{found.kind}: {_change(found.first)}")]
    if found.beyond is not None:
        lines.append(("beyond", describe_place(found.beyond)))
    counts = [f"{m.changed:,} of {m.tensors:,} {m.kind}" for m in found.moments if m.changed]
    lines.append(("tensors", ", ".join(counts)))
    if not found.by_digest:
        drift = ", ".join(f"{distance:.1e}" for distance in found.drift)
        lines.append(("drift", f"{drift} (relative L2 of the parameters, step by step)"))
    return lines


def _change(place: Difference) -> str:
    index = f"[{','.join(map(str, place.index))}]" if place.index else ""
    where = f"step {place.step}, {place.parameter}{index}, rank {place.rank}"
    text = f"{where}: was {show(place.expected)}, is {show(place.actual)}"
    return text if place.ulp is None else f"{text}, {place.ulp:,} ULP"
