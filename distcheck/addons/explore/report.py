"""Prints the result of a search on the terminal and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console
from rich.text import Text

from distcheck.addons.explore.failure_database import reproducing_program
from distcheck.addons.explore.search import Finding, Search
from distcheck.backends import name_of
from distcheck.errors import ExitCode
from distcheck.errors.shown_text import displayable
from distcheck.judge.sensitivity import only_unrevealed_mistakes
from distcheck.plan.declined import notes_on_words
from distcheck.records import Case
from distcheck.records.generated_words import PREFIX, parse_model_words
from distcheck.reports import json_report
from distcheck.reports.brief import add_failure
from distcheck.reports.terminal import console_for
from distcheck.reports.wrapping import LabeledLines

SCHEMA = "distcheck.explore/1"
_INDENT = 2
ONE_RANK = (
    "every case that passed has only one rank, which has nothing to synchronize; search "
    "longer (--budget)"
)


@dataclass(frozen=True, kw_only=True)
class ExploreResult:
    """A finished search, and the file in which its finding is stored."""

    strategy: str
    seed: int
    spent_s: float
    search: Search
    earlier: int
    unreadable: tuple[str, ...]
    interrupted: bool
    kept_as: Path | None

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of the search: unknown if no case was run, or if a case could not be judged."""
        search = self.search
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if search.finding is not None:
            failed = search.finding.report.ranks_failed
            return ExitCode.RANK_FAILED if failed else ExitCode.MISMATCH
        if search.once:
            return ExitCode.MISMATCH
        return ExitCode.UNKNOWN if search.unknown or not search.has_shown else ExitCode.PASS

    @property
    def replay(self) -> str:
        """Command that replays the failing case; empty if there is none or it was not stored."""
        return f"distcheck replay {quote(str(self.kept_as))}" if self.kept_as else ""


def cases_by_value(cases: list[Case]) -> dict[str, dict[str, int]]:
    """Return, for each dimension of the search, how many cases had each value. A case with several
    layers counts once for each kind of layer and each mark.
    """
    counts: dict[str, Counter[str]] = {}

    def count(dimension: str, values: set[str]) -> None:
        counts.setdefault(dimension, Counter()).update(values)

    for case in cases:
        model = parse_model_words(case.workload.removeprefix(PREFIX))
        count("world", {str(case.world)})
        count("steps", {str(case.steps)})
        count("dtype", {case.dtype})
        count("shards", {"unequal" if case.batch % case.world else "equal"})
        if model.samples < case.batch * case.steps:
            count("shards", {"short last batch"})
        count("layers", {layer.kind for layer in model.layers})
        count("marks", {mark for layer in model.layers for mark in layer.marks} or {"none"})
        count("nested", {str(max(layer.nested for layer in model.layers))})
        count("optimizer", {model.optimizer})
        count("groups", {"2" if model.groups else "1"})
        count("rates", {"change" if model.schedule else "constant"})
        count("accumulate", {str(model.accumulate)})
        if name_of(case.backend) == "simulated":
            count("schedules", {str(case.schedules)})
        count("delayed ranks", {str(len({late.rank for late in case.delays}))})
        for name, value in case.adaptation.arguments:
            count(f"argument {name}", {value})
    return {name: dict(sorted(found.items())) for name, found in counts.items()}


def print_search(story: ExploreResult, *, quiet: bool) -> None:
    console = console_for()
    console.print(_headline(story), soft_wrap=True)
    if not quiet:
        lines = LabeledLines(console, indent=_INDENT)
        if story.search.finding is not None:
            report = displayable(story.search.finding.report)
            add_failure(report, report.diagnosis, lines)
        for label, text in _lines(story):
            lines.add(label, displayable(text), most=4)
        lines.add("replay", displayable(story.replay), most=0)
        lines.print()
    if quiet:
        if story.replay:
            line = f"{' ' * _INDENT}replay  {displayable(story.replay)}"
            console.print(Text(line), soft_wrap=True)
        return
    if story.search.finding is None:
        _show_coverage(story, console)
        return
    console.print()  # without indentation, so that it can be copied
    console.print(
        Text(displayable(reproducing_program(story.search.finding.report.case)).rstrip()),
        soft_wrap=True,
    )


def as_json(story: ExploreResult) -> str:
    search, finding = story.search, story.search.finding
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "strategy": story.strategy,
        "seed": story.seed,
        "exit_code": int(story.exit_code),
        "interrupted": story.interrupted,
        "spent_s": round(story.spent_s, 3),
        "cases": len(search.cases),
        "passed": len(search.passed),
        "unknown": [report.case for report in search.unknown],
        "insensitive": [report.case for report in search.insensitive],
        "failed_once": [report.case for report in search.once],
        "kept_cases": story.earlier,
        "shrunk_in": search.shrunk_in,
        "coverage": cases_by_value(search.cases),
        "left_out": search.runner.left_out,
        "finding": None,
    }
    if finding is not None:
        document["finding"] = {
            "report": finding.report,
            "failed": finding.failed,
            "replays": finding.replays,
            "unshrunk": finding.unshrunk,
            "file": str(story.kept_as) if story.kept_as else None,
            "python": reproducing_program(finding.report.case),
        }
    return json_report.render(document)


def _headline(story: ExploreResult) -> Text:
    search = story.search
    code = story.exit_code
    bad = search.finding is not None or bool(search.once)
    word = "FAIL" if bad else "PASS" if code is ExitCode.PASS else "UNKNOWN"
    style = {"FAIL": "bold red", "PASS": "bold green"}.get(word, "bold yellow")
    count, spent = len(search.cases), f"{story.spent_s:.0f} s"
    cases = f"{count} case{'s' * (count != 1)}"
    if search.finding is not None:
        causes = dict.fromkeys(one.cause for one in search.finding.report.diagnosis)
        what = ", ".join([*causes][:3])
        said = f"{what}{', ' * bool(what)}found in {cases}, of which {search.shrunk_in} minimized "
        said += f"it; {spent}"
    elif search.once:
        said = f"found a failure in {cases} that was not reproducible; {spent}"
    elif not count:
        said = "no case was run"
        if not story.interrupted:
            said += f", because the budget ended after {spent}; pass a longer one (--budget 1m)"
    else:
        said = f"found nothing in {cases}; {spent}"
    interrupted = ", interrupted" if story.interrupted else ""
    return Text.assemble(
        (f"{word:<8}", style), f"{story.strategy}: {said}, seed {story.seed}{interrupted}"
    )


def _lines(story: ExploreResult) -> Iterator[tuple[str, str]]:
    search = story.search
    if search.finding is not None:
        yield from _lines_of(search.finding)
    for report in search.once:
        outcome = "a rank failed" if report.ranks_failed else "a mismatch"
        yield (
            "once",
            f"{outcome} in {report.case.workload}, world {report.case.world}, on ranks that had "
            "trained other cases. It was not reproducible on fresh ranks: a rare race condition, "
            "or state that persists between models",
        )
    for report in search.unknown[:3]:
        reasons = {c.reason for c in report.checks if c.verdict == "unknown"}
        yield "unknown", f"{report.case.workload}: {'; '.join(sorted(reasons))}"
    if search.passed and not search.has_shown and search.finding is None:
        yield "unknown", ONE_RANK
    if search.insensitive:
        yield "note", _about_insensitive(search)
    for word, why in search.runner.left_out.items():
        yield "note", f"{word} was excluded: {why}"
    if search.runner.distrusts_kept:
        yield "note", search.runner.distrusts_kept
    if story.earlier:
        one = story.earlier == 1
        cases = "1 failing case" if one else f"{story.earlier} failing cases"
        yield "note", f"{cases} of earlier runs {'was' if one else 'were'} run first"
    for text in story.unreadable:
        yield "note", f"a failing case of an earlier run was not run: {text}"


def _lines_of(finding: Finding) -> Iterator[tuple[str, str]]:
    case = finding.report.case
    steps = f"{case.steps} step{'s' * (case.steps != 1)}"
    samples = f"batch size {case.batch}"
    given = "".join(f", {name}={value}" for name, value in case.adaptation.arguments)
    given += f", {case.schedules} schedules" if case.schedules else ""
    given += f", backend {case.backend}" if case.backend != "gloo" else ""
    yield (
        "case",
        f"world size {case.world}, {steps}, {samples}, {case.dtype}, {case.workload}{given}",
    )
    for late in case.delays:
        before = f"collective {late.collective}" if late.collective else "backward"
        yield "delay", f"rank {late.rank} waits {late.ms} ms before {before} of every step"
    if finding.replays and finding.failed < finding.replays:
        yield (
            "flaky",
            f"it failed in only {finding.failed} of {finding.replays} replays on fresh ranks: a "
            "race condition",
        )
    for note in notes_on_words(case):
        yield "note", note
    if finding.unshrunk:
        yield "note", f"a smaller failing case may exist: {finding.unshrunk}"


def _about_insensitive(search: Search) -> str:
    """Return a note on the cases that could not have shown a mistake, with the reason of the first;
    they do not count as passed.
    """
    first = search.insensitive[0]
    count, of = len(search.insensitive), len(search.cases)
    return (
        f"{count} of {of} cases {'do' if count > 1 else 'does'} not count as passed: nothing "
        "differed, but not every simple mistake would have been revealed. In "
        f"{first.case.workload}, "
        f"world {first.case.world}, {first.case.dtype}: {only_unrevealed_mistakes(first.checks)}"
    )


def _show_coverage(story: ExploreResult, console: Console) -> None:
    for name, counts in cases_by_value(story.search.cases).items():
        found = ", ".join(f"{value} {number}" for value, number in counts.items())
        console.print(Text(f"{' ' * _INDENT}{name:<10}  {found}"), soft_wrap=True)
    if story.search.passed:
        console.print(
            "\nA search that finds nothing does not cover the cases that it did not draw.",
            soft_wrap=True,
        )
