"""A comparison for a person."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.errors.shown_text import shown
from distcheck.records import Change, Difference
from distcheck.reports.wording import STYLE, describe_place, show


def render(comparison: RunsComparison, console: Console, *, quiet: bool = False) -> None:
    """How many cases have changed, and what has around them; then every case, those that changed
    first, in full where bits differ.
    """
    comparison = shown(comparison)
    common = _common(comparison)
    if not quiet:
        console.print(Text(headline(comparison), style="bold"), soft_wrap=True)
        changes = "; ".join(map(str, common)) or "nothing that is recorded"
        console.print(Text(f"changed between the runs: {changes}"), style="dim")
    for case in sorted(comparison.cases, key=lambda case: case.bits == "same"):
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


def headline(comparison: RunsComparison) -> str:
    """How many of the cases have changed, by how much, and with which versions."""
    cases = comparison.cases
    versions = [change for change in _common(comparison) if change.kind == "software"]
    said = ", ".join(f"{one.name} {one.then} -> {one.now}" for one in versions)
    changed = [case for case in cases if case.bits == "changed"]
    compared = [case for case in cases if case.bits != "not compared"]
    of = f"{len(compared)} of {len(cases)} cases compared" if len(compared) < len(cases) else ""
    if not compared:
        return "nothing was compared"
    if changed:
        firsts = [c.found.first for c in changed if c.found.first is not None]
        worst = max(firsts, key=lambda one: one.ulp or 0, default=None)
        far = (
            f", first by up to {worst.ulp:,} ULP in {worst.parameter}"
            if worst and worst.ulp
            else ""
        )
        wrong = sum(case.verdict == "fail" for case in changed)
        text = f"{len(changed)} of {len(compared)} cases changed{far}, {wrong} beyond the bound"
    else:
        text = f"{len(compared)} case{'s' * (len(compared) != 1)}, no bit changed"
    return ": ".join(filter(None, [said, "; ".join(filter(None, [text, of]))]))


def _common(comparison: RunsComparison) -> list[Change]:
    """What has changed around every case."""
    known = [case.changes for case in comparison.cases if case.bits != "not compared"]
    return [change for change in known[0] if all(change in own for own in known)] if known else []


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
