"""The screen of a report that was read from its JSON: of several that `merge` joined, or of one."""

from collections.abc import Iterator, Sequence

from distcheck.reports.document import CaseEntry, Document
from distcheck.reports.findings import FailureSummary, finding_of, name_of
from distcheck.reports.wording import describe_search
from distcheck.reports.wrapping import CUT, VERDICT, fitting

_INDENT = 18  # columns
_MOST_CAUSES = 2  # of a failure; the rest is in the HTML page and the JSON


def screen_of(document: Document, *, width: int, quiet: bool = False) -> list[str]:
    """How many cases have which verdict, and what did not pass, each kind of failure once. The
    first line alone if `quiet`. Commands are not wrapped.
    """
    cases = document.cases
    count = {v: sum(case.verdict == v for case in cases) for v in ("fail", "unknown", "pass")}
    counts = [f"{number} {verdict}" for verdict, number in count.items() if number]
    counts += [f"{len(document.left_out)} left out"] if document.left_out else []
    parts, plan = len(document.parts or ()), document.plan
    of = [f"{len(plan.cases)} planned cells"] if plan else []
    of += [f"{parts} report{'' if parts == 1 else 's'}"] if parts else []
    about = f"{', '.join(of)}: {', '.join(counts)}" if of else ", ".join(counts)
    found = [f"{document.verdict.upper():<{VERDICT}}{about}"]
    if quiet:
        return found
    found += [f"  {describe_search(one)}" for one in document.explored]
    said: set[tuple[str, str]] = set()
    for alike in _alike([case for case in cases if case.verdict != "pass"]):
        found += _failure(alike, width, said)
    if any(line.endswith(CUT) for line in found):
        found.append(f'{"more":<{VERDICT}}all of "{CUT}": --html FILE')
    return found


def _alike(cases: Sequence[CaseEntry]) -> list[list[CaseEntry]]:
    together: dict[object, list[CaseEntry]] = {}
    for case in cases:
        causes = sorted({one.cause for one in case.diagnosis})
        known = causes and "unexplained" not in causes
        same = causes if known else [finding_of(case).headline]
        key = (case.strategy, case.verdict, *same)
        together.setdefault(key, []).append(case)
    return [*together.values()]


def _failure(cases: Sequence[CaseEntry], width: int, said: set[tuple[str, str]]) -> Iterator[str]:
    """Cases that are wrong alike; what to try is left out where it was `said` of the strategy."""
    case, *others = cases
    finding = finding_of(case)
    causes = ", ".join(dict.fromkeys(one.cause for one in case.diagnosis))
    what = f"{case.strategy}, {name_of(case)}: {causes or finding.headline}"
    head = f"  {case.verdict.upper():<{VERDICT}}"
    yield from fitting(what, width, first=head, indent=2 + VERDICT, most=4)
    for label, text in _lines(finding, [one.evidence for one in case.diagnosis]):
        yield from fitting(text, width, first=f"{'':<10}{label}", indent=_INDENT, most=3)
    for text in dict.fromkeys(finding.suggestions[:_MOST_CAUSES]):
        if (case.strategy, text) not in said:
            yield from fitting(text, width, first=f"{'':<10}try", indent=_INDENT, most=2)
            said.add((case.strategy, text))
    if others:
        names = "; ".join(name_of(one) for one in others)
        yield from fitting(names, width, first=f"{'':<10}also", indent=_INDENT, most=3)
    if finding.replay:
        yield f"{'':<10}{'replay':<{_INDENT - 10}}{finding.replay}"


def _lines(finding: FailureSummary, evidence: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in evidence[:_MOST_CAUSES]:
        yield "cause", text
    if evidence and finding.first:
        yield "first", finding.first
    if finding.where:
        yield "where", finding.where
