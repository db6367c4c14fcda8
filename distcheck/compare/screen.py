"""Formats a comparison for the screen, as an HTML page with old and new values in columns, and as a
report with one check per case, `compare`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from distcheck import __version__
from distcheck.compare.records import (
    CaseComparison,
    RunsComparison,
    ScoredToken,
    ScoresComparison,
)
from distcheck.errors.shown_text import displayable
from distcheck.recordings.differing import TraceComparison
from distcheck.records import (
    Case,
    CaseReport,
    Change,
    CheckResult,
    Compared,
    Difference,
    Origin,
    Report,
)
from distcheck.reports.html_report import page, tree
from distcheck.reports.json_report import as_document
from distcheck.reports.pictures import Picture, Table, curves
from distcheck.reports.wording import describe_place, sentence_on_modules, show
from distcheck.reports.wrapping import VERDICT, print_hanging, print_verdict


def render(comparison: RunsComparison, console: Console, *, quiet: bool = False) -> None:
    """Print the changes before the first step, then the number of changed cases, and every case.
    Changed cases come first, with all details.
    """
    comparison = displayable(comparison)
    common = common_changes(comparison)
    if not quiet:
        changes = [str(change) for change in common] or ["no recorded setting changed"]
        said = f"changed between the runs: {changes[0]}" if common else changes[0]
        print_hanging(said, console, indent=0, style="dim")
        for change in changes[1:]:
            print_hanging(change, console, indent=2, style="dim")
        print_hanging(headline(comparison), console, indent=0, style="bold")
    for case in sorted(comparison.cases, key=lambda case: case.bits == "same"):
        said = f"{case.id}: bits {case.bits}; {case.reason}"
        print_verdict(said, case.verdict, console, bold=case.id)
        if quiet:
            continue
        own = [("changed", str(change)) for change in case.changes if change not in common]
        for label, sentence in (*_details(case), *own):
            first = f"{'':<{VERDICT}}{label}"
            print_hanging(sentence, console, first=first, indent=2 * VERDICT)
    if comparison.saved_to is not None and not quiet:
        console.print(Text(f"saved: {comparison.saved_to}"), soft_wrap=True)


def headline(comparison: RunsComparison) -> str:
    """Return the number of changed cases, the size of the change, and changed versions."""
    cases = comparison.cases
    versions = [change for change in common_changes(comparison) if change.kind == "software"]
    said = ", ".join(f"{one.name} {one.then} -> {one.now}" for one in versions)
    changed = [case for case in cases if case.bits == "changed"]
    compared = [case for case in cases if case.bits != "not compared"]
    of = f"{len(compared)} of {len(cases)} cases compared" if len(compared) < len(cases) else ""
    if not compared:
        return "no case was compared"
    if cases[0].scores is not None:
        return _describe_scores(cases[0], cases[0].scores)
    if len(cases) == 1 and cases[0].found.noise_floor:
        return ": ".join(filter(None, [said, _describe_job_difference(cases[0])]))
    if changed:
        firsts = [c.found.first for c in changed if c.found.first is not None]
        worst = max(firsts, key=lambda one: one.ulp or 0, default=None)
        far = (
            f" (first difference: up to {worst.ulp:,} ULP, in {worst.parameter})"
            if worst and worst.ulp
            else ""
        )
        wrong = sum(case.verdict == "fail" for case in changed)
        text = f"{len(changed)} of {len(compared)} cases changed{far}"
        text += f"; {wrong or 'none'} exceed{'s' * (wrong < 2)} the bound"
    else:
        text = f"{len(compared)} case{'s' * (len(compared) != 1)}, no bit changed"
    return ": ".join(filter(None, [said, "; ".join(filter(None, [text, of]))]))


def _describe_job_difference(case: CaseComparison) -> str:
    """Describe the first difference between two jobs, and if it is within rounding."""
    found = case.found
    if found.first is None:
        return f"no bit changed in {len(found.drift)} steps"
    place = found.beyond or found.first
    kind = found.beyond_kind or found.kind
    where = f"step {place.step}, {kind} ({place.parameter})"
    if found.beyond is not None:
        return f"the jobs diverge by more than rounding: {where}"
    if case.verdict == "pass":
        shares = [d / y for d, y in zip(found.drift, found.noise_floor, strict=False) if y]
        most = f"; drift at most {max(shares):.2g}x the noise floor" if shares else ""
        return f"the jobs differ only by rounding, first at {where}{most}"
    return f"the jobs diverge at {where}"


def _describe_scores(case: CaseComparison, scores: ScoresComparison) -> str:
    """Describe the mean difference of log-probabilities, and if it is rounding."""
    floor = scores.noise_floor
    if not scores.mean:
        return f"no bit changed in {scores.tokens:,} log-probabilities"
    text = f"mean difference {scores.mean:.2g} nats"
    if not floor:
        return f"{text}, without a noise floor"
    where = "" if scores.first is None else f", first at {_place(scores.first)}"
    text = f"{text}, {scores.mean / floor:.2g}x the noise floor:"
    if case.verdict == "unknown":
        return f"{text} not decided{where}"
    return f"{text} not rounding{where}" if case.verdict == "fail" else f"{text} rounding"


def _place(token: ScoredToken) -> str:
    return f"sequence {token.sequence}, position {token.position}"


def _of_scores(case: CaseComparison, scores: ScoresComparison) -> list[tuple[str, str]]:
    """Return the lines on two files of log-probabilities."""
    size = f"{scores.tokens:,} tokens of {scores.sequences:,} sequences; {scores.beyond:,} beyond"
    floor = f", mean noise floor {scores.noise_floor:.2g}" if scores.noise_floor else ""
    lines = [("tokens", f"{size}; mean signed difference {scores.signed_mean:.2g} nats{floor}")]
    if scores.first is not None:
        lines.append(("first", _describe_token(scores.first)))
    if case.verdict == "pass":
        said = "; ".join(scores.not_detected)
        return [*lines, ("limits", f"not detected by this pass: {said}")] if said else lines
    worst = zip(("worst", "", ""), scores.worst, strict=False)
    return lines + [(label, _describe_token(token)) for label, token in worst]


def _describe_token(token: ScoredToken) -> str:
    was, now = (f"{v:.9g}" for v in (token.then, token.now))
    said = f"{_place(token)}, token {token.token}: was {was}, is {now}, a difference of"
    return f"{said} {token.now - token.then:.2g}, noise floor {token.noise_floor:.2g}"


def _pictures_of_scores(scores: ScoresComparison) -> list[Picture]:
    """Draw the distance and the noise floor over position and over sequence, as logarithms."""
    drawn = [
        curves.draw(
            f"by-{unit}",
            "log10 of the distance in nats",
            unit,
            [[None if not pair[k] else math.log10(pair[k] or 1) for pair in pairs] for k in (0, 1)],
            runs=("distance", "noise floor"),
            shares=False,
            first=0,
        )
        for unit, pairs in (("position", scores.by_position), ("sequence", scores.by_sequence))
    ]
    return [picture for picture in drawn if picture is not None]


def _worst_tokens(scores: ScoresComparison) -> Table:
    heads = ["sequence", "position", "token", "old", "new", "difference", "noise floor"]
    rows = [
        [
            f"{one.sequence}", f"{one.position}", f"{one.token}", f"{one.then:.6g}",
            f"{one.now:.6g}", f"{one.now - one.then:.3g}", f"{one.noise_floor:.3g}",
        ]
        for one in scores.worst
    ]  # fmt: skip
    return Table(heads, rows)


def common_changes(comparison: RunsComparison) -> list[Change]:
    known = [case.changes for case in comparison.cases if case.bits != "not compared"]
    return [change for change in known[0] if all(change in own for own in known)] if known else []


def _details(case: CaseComparison) -> list[tuple[str, str]]:
    found = case.found
    if case.scores is not None:
        return [*_of_scores(case, case.scores), *of_jobs(case)]
    if found.first is None:
        return []
    old, new = old_and_new(found.first)
    apart = "" if found.first.ulp is None else f", {found.first.ulp:,} ULP"
    where = f"{found.kind}: {found.first.place}"
    lines = [("first", f"{where}: was {old}, is {new}{apart}")]
    if found.beyond is not None:
        said = f"{found.beyond_kind}: " if found.beyond_kind else ""
        lines.append(("beyond", said + describe_place(found.beyond)))
    lines.append(("tensors", f"{changed_tensors_text(found)} changed"))
    if not found.by_digest:
        drift = ", ".join(f"{distance:.1e}" for distance in found.drift)
        lines.append(("drift", f"{drift} (relative L2 distance of the parameters, by step)"))
    return lines + of_jobs(case)


def of_jobs(case: CaseComparison) -> list[tuple[str, str]]:
    """Return further lines on two jobs: first module and operator, noise floor, causes."""
    lines = [("module", sentence_on_modules(case.modules))] if case.modules is not None else []
    lines += [("op", case.op)] if case.op else []
    if case.found.noise_floor:
        perturbed = ", ".join(f"{distance:.1e}" for distance in case.found.noise_floor)
        lines.append(
            ("one ULP", f"{perturbed} (noise floor: the drift of runs perturbed by one ULP)")
        )
    for one in case.diagnosis:
        lines += [("cause", f"{one.cause}: {one.evidence}"), ("try", one.suggestion)]
    return lines


def changed_tensors_text(found: TraceComparison) -> str:
    moments = [f"{m.changed:,} of {m.tensors:,} {m.kind}" for m in found.moments if m.changed]
    return ", ".join(moments)


def old_and_new(place: Difference) -> tuple[str, str]:
    """Format both numbers, with enough digits to distinguish them."""
    old, new = show(place.expected), show(place.actual)
    if old == new and place.expected != place.actual:
        return f"{place.expected:.17g}", f"{place.actual:.17g}"
    return old, new


def render_page(comparison: RunsComparison, *, command: str) -> str:
    """Return the HTML page; `command` is the command line that repeats the comparison."""
    comparison = displayable(comparison)
    common = common_changes(comparison)
    made = comparison.made
    return page(
        "comparison.html.jinja",
        verdict=comparison.verdict,
        headline=headline(comparison),
        then=comparison.then,
        now=comparison.now,
        changes=common,
        rows=[
            _row(case) | {"changes": [one for one in case.changes if one not in common]}
            for case in sorted(comparison.cases, key=lambda case: case.bits == "same")
        ],
        command=displayable(command),
        saved_to=comparison.saved_to,
        date="" if made is None else made.date,
        version=__version__,
    )


def _row(case: CaseComparison) -> dict[str, Any]:
    first = case.found.first
    row: dict[str, Any] = {
        "id": case.id,
        "verdict": case.verdict,
        "bits": case.bits,
        "reason": case.reason,
    }
    row["lines"] = of_jobs(case) if case.scores is None else _details(case)
    row["pictures"] = [] if case.scores is None else _pictures_of_scores(case.scores)
    row["worst"] = Table((), ()) if case.scores is None else _worst_tokens(case.scores)
    found = case.modules
    row["modules"] = [] if found is None else tree(found.modules)
    row["first_module"] = "" if found is None else found.first
    if first is None:
        return row | {"place": "", "old": "", "new": "", "apart": "", "tensors": ""}
    old, new = old_and_new(first)
    return row | {
        "place": f"{case.found.kind}: {first.place}",
        "old": old,
        "new": new,
        "apart": "" if first.ulp is None else f"{first.ulp:,} ULP",
        "tensors": changed_tensors_text(case.found),
    }


@dataclass(frozen=True)
class KnownCase:
    """Fields of a case that its report needs in addition to the comparison."""

    case: Case
    environment: dict[str, Any]
    strategy_file: str
    strategy_line: int = 0


def comparison_document(
    comparison: RunsComparison, cases: Mapping[str, KnownCase], *, made: Origin, command: str
) -> dict[str, Any]:
    """Return the document for JUnit and GitHub. `cases` are the cases of both runs, and `command`
    is the command line that repeats the comparison.
    """
    environment = next((saved.environment for saved in cases.values()), {})
    reports = tuple(
        _case(one, cases[one.id], replay=command) for one in comparison.cases if one.id in cases
    )
    return as_document(Report(environment=environment, cases=reports, made=made))


def _case(found: CaseComparison, saved: KnownCase, *, replay: str) -> CaseReport:
    compared = found.found
    place = compared.beyond or compared.first
    said = [f"bits {found.bits}", found.reason]
    if compared.first is not None and compared.beyond is not None:
        said.append(f"first difference beyond its bound: {describe_place(compared.beyond)}")
    tensors = sum(moment.tensors for moment in compared.moments)
    check = CheckResult(
        check="compare",
        layer="-",
        verdict=found.verdict,
        compared=Compared(tensors=tensors, ranks=saved.case.world, steps=saved.case.steps),
        first=place if found.verdict == "fail" else None,
        reason="; ".join(filter(None, said)),
    )
    return CaseReport(
        case=saved.case,
        strategy_file=saved.strategy_file,
        strategy_line=saved.strategy_line,
        verdict=found.verdict,
        outcomes=(),
        checks=(check,),
        diagnosis=found.diagnosis,
        replay=replay,
        notes=tuple(f"changed between the runs: {change}" for change in found.changes),
    )
