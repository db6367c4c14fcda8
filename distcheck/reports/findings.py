"""Summarizes cases that did not pass, for formats with a few lines per case; and prints the screen
of a report that was read from JSON, such as a merged one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from distcheck.errors.masking import masked_command
from distcheck.judge.checks.merging import earliest_failure
from distcheck.records import Case, CaseReport, Origin
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import check_with_layer
from distcheck.reports.json_report import Document
from distcheck.reports.wording import advice_lines, describe_search, describe_site
from distcheck.reports.wrapping import CUT, VERDICT, wrap_limited


@dataclass(frozen=True)
class FailureSummary:
    """Summary of a case that did not pass. Texts may be empty."""

    headline: str  # one line
    first: str  # the first divergence, or missing coverage
    where: str  # the line that the causes concern
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]
    ranks: tuple[tuple[str, str], ...]  # of failed ranks: "rank 2 raised", and the detail
    replay: str  # independent of the files of the machine


def cell_name(case: Case) -> str:
    """Return the properties that distinguish a cell, except the strategy."""
    device = "" if case.device == "cpu" else f", {case.device}"
    seed = f", seed {case.seed}" if case.seed else ""
    about = f"world {case.world}, {case.backend}{device}, {case.workload} {case.dtype}"
    return about + seed


def cell_names(cases: Sequence[CaseReport]) -> list[str]:
    """Return names of cells that are unique for each strategy. They contain the id if necessary."""
    names = [(case.case.strategy, cell_name(case.case)) for case in cases]
    times = Counter(names)
    return [
        name if times[strategy, name] == 1 else f"{name}, {case.case.id}"
        for (strategy, name), case in zip(names, cases, strict=True)
    ]


def failure_summary(case: CaseReport) -> FailureSummary:
    failed = [(f"rank {o.rank} {o.outcome}", o.detail) for o in case.outcomes
              if o.outcome != RankEnd.FINISHED]  # fmt: skip
    check = earliest_failure(case.checks) or earliest_failure(case.checks, "unknown")
    first = ""
    if check is not None:
        first = f"{check_with_layer(check.check, check.layer)}: {check.reason or check.verdict}"
    headline = failed[0][0] if case.ranks_failed else first or "; ".join(case.notes) or case.verdict
    return FailureSummary(
        headline=" ".join(headline.split()),
        first=first.replace("first divergence: ", "", 1),
        where=describe_site(case.where, case.strategy_file),
        causes=tuple(f"{d.cause}: {d.evidence}" for d in case.diagnosis),
        suggestions=tuple(d.suggestion for d in case.diagnosis if d.suggestion),
        ranks=tuple(failed),
        replay=portable_command(case),
    )


def portable_command(case: CaseReport) -> str:
    """Return the command that repeats a case without secrets: that of a comparison, else one that
    runs the case without the files of a run.
    """
    is_comparison = any(check.check == "compare" for check in case.checks)
    return masked_command(case.replay if is_comparison else case.case.command_line)


def source_place(case: CaseReport, root: Path) -> tuple[str, int]:
    """Return the file and line of the cause of a case, or of its strategy. The file is relative to
    the repository `root`. If the machine that ran the case had another path to the repository, it
    is the longest suffix of the path that exists here.
    """
    file, line = case.strategy_file, case.strategy_line or 1
    if case.where and case.where.file:
        file, line = case.where.file, case.where.line
    path = PurePath(file)
    if path.is_relative_to(root):
        return str(path.relative_to(root)), line
    for n in range(1, len(path.parts)):
        tail = PurePath(*path.parts[n:])
        try:
            if (root / tail).is_file():
                return str(tail), line
        except (OSError, ValueError):  # an invalid file name
            break
    return file, line


def describe_origin(made: Origin | None) -> str:
    """Return the origin of a report in one line: date, commit and command; "" if it is not
    recorded.
    """
    if made is None:
        return ""
    state = {True: "", False: " with changes", None: " (changes not known)"}[made.clean]
    parts = [made.date.replace("T", " ")]
    parts += [f"commit {made.commit[:12]}{state}"] if made.commit else []
    parts += [made.command] if made.command else []
    return " · ".join(parts)


COUNTED = {"fail": "failed", "unknown": "unknown", "pass": "passed"}
_INDENT = 18  # columns
_MOST_CAUSES = 2  # of a failure; the rest is in the HTML page and the JSON


def summary_lines(document: Document, *, width: int, quiet: bool = False) -> list[str]:
    """Return the number of cases per verdict, and each kind of failure once; with `quiet`, only the
    first line. Commands are not wrapped.
    """
    cases = document.cases
    count = {v: sum(case.verdict == v for case in cases) for v in COUNTED}
    counts = [f"{number} {COUNTED[verdict]}" for verdict, number in count.items() if number]
    counts += [f"{len(document.left_out)} left out"] if document.left_out else []
    parts, plan = len(document.parts or ()), document.plan
    of = [f"{len(plan.cases)} planned cases"] if plan else []
    of += [f"{parts} report{'' if parts == 1 else 's'}"] if parts else []
    about = f"{', '.join(of)}: {', '.join(counts)}" if of else ", ".join(counts)
    found = [f"{document.verdict.upper():<{VERDICT}}{about}"]
    if quiet:
        return found
    found += [f"  {describe_search(one)}" for one in document.explored]
    said: set[tuple[str, str]] = set()
    for alike in _group_similar_cases([case for case in cases if case.verdict != "pass"]):
        found += _failure(alike, width, said)
    if any(line.endswith(CUT) for line in found):
        found.append(f'{"more":<{VERDICT}}"{CUT}" in full: --html FILE')
    return found


def _group_similar_cases(cases: Sequence[CaseReport]) -> list[list[CaseReport]]:
    together: dict[object, list[CaseReport]] = {}
    for case in cases:
        causes = sorted({one.cause for one in case.diagnosis})
        known = causes and "unexplained" not in causes
        same = causes if known else [failure_summary(case).headline]
        key = (case.case.strategy, case.verdict, *same)
        together.setdefault(key, []).append(case)
    return [*together.values()]


def _failure(cases: Sequence[CaseReport], width: int, said: set[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of equal failures. Repairs already printed for the strategy (`said`) are
    omitted.
    """
    case, *others = cases
    finding = failure_summary(case)
    causes = ", ".join(dict.fromkeys(one.cause for one in case.diagnosis))
    what = f"{case.case.strategy}, {cell_name(case.case)}: {causes or finding.headline}"
    head = f"  {case.verdict.upper():<{VERDICT}}"
    yield from wrap_limited(what, width, first=head, indent=2 + VERDICT, most=4)
    for label, text in _lines(finding, [one.evidence for one in case.diagnosis]):
        yield from wrap_limited(text, width, first=f"{'':<10}{label}", indent=_INDENT, most=3)
    for suggestion in dict.fromkeys(finding.suggestions[:_MOST_CAUSES]):
        if (case.case.strategy, suggestion) not in said:
            for label, text in advice_lines(suggestion):
                yield from wrap_limited(
                    text, width, first=f"{'':<10}{label}", indent=_INDENT, most=2
                )
            said.add((case.case.strategy, suggestion))
    if others:
        names = "; ".join(cell_name(one.case) for one in others)
        yield from wrap_limited(names, width, first=f"{'':<10}also in", indent=_INDENT, most=3)
    if finding.replay:
        yield f"{'':<10}{'replay':<{_INDENT - 10}}{finding.replay}"


def _lines(finding: FailureSummary, evidence: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in evidence[:_MOST_CAUSES]:
        yield "cause", text
    if evidence and finding.first:
        first = finding.first
        for text in evidence:  # which may repeat the reason of the check
            first = first.replace(f"; {text}", "")
        yield "first", first
    if finding.where:
        yield "where", finding.where
