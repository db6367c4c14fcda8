"""Formats a case that did not pass: ranks, first divergence, causes, replay."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.text import Text

from distcheck.errors.shown_text import displayable
from distcheck.judge.checks.merging import earliest_failure
from distcheck.records import CaseReport, CheckResult, Diagnosis, Outcome
from distcheck.records.causes import APART
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import check_with_layer
from distcheck.records.odd_ranks import grouped
from distcheck.reports.wording import (
    advice_lines,
    describe_place,
    describe_site,
    most_telling_first,
)
from distcheck.reports.wrapping import LabeledLines

Key = tuple[object, ...]


@dataclass
class PrintedCauses:
    """The causes and failures that are already on a screen, each with the world for which it was
    printed.
    """

    failures: dict[Key, int] = field(default_factory=dict)
    causes: dict[tuple[str, str, str], int] = field(default_factory=dict)
    cut: bool = False  # if some line was cut

    def new_and_known(self, case: CaseReport) -> tuple[list[Diagnosis], list[Diagnosis]]:
        """Return the causes of a case without duplicates: new ones, and those already printed for
        its strategy. Unexplained failures are always new.
        """
        once = {one.cause: one for one in reversed(case.diagnosis)}
        new, old = list[Diagnosis](), list[Diagnosis]()
        for cause in dict.fromkeys(one.cause for one in case.diagnosis):
            was_said = cause != "unexplained" and self._key(case, cause) in self.causes
            (old if was_said else new).append(once[cause])
        return new, old

    def add(self, case: CaseReport, causes: Iterable[Diagnosis]) -> None:
        """Record the printed causes of a case. A cause that was printed as one of several
        indistinguishable candidates is printed again when it is the only one.
        """
        self.causes |= {
            self._key(case, one.cause): case.case.world
            for one in causes
            if APART not in one.evidence
        }

    def world_of(self, case: CaseReport, one: Diagnosis) -> int:
        """Return the world for which a cause was first printed for this case's strategy."""
        return self.causes[self._key(case, one.cause)]

    def _key(self, case: CaseReport, cause: str) -> tuple[str, str, str]:
        return case.case.strategy, case.case.backend, cause


def group_by_evidence(
    causes: Sequence[Diagnosis], first: CheckResult | None
) -> dict[str, list[Diagnosis]]:
    """Group causes with equal evidence. If the evidence begins by saying that the `first` check
    differs, that prefix is removed.
    """
    found: dict[str, list[Diagnosis]] = {}
    for one in causes:
        differs, _, rest = one.evidence.partition("; ")
        if rest and first is not None and differs.startswith(f"{first.check} diverge first: "):
            one = msgspec.structs.replace(one, evidence=rest)
        seen, apart, _ = one.evidence.partition(f"; {APART} ")
        found.setdefault(seen if apart else one.evidence, []).append(one)
    return {alike[0].evidence if len(alike) == 1 else seen: alike for seen, alike in found.items()}


_DETAIL_LINES = 14  # of a rank's traceback or stack
_INDENT = 4
_MARKS = re.compile(r"\s*[~^]+\s*")


def group_equal_failures(cases: Sequence[CaseReport]) -> dict[Key, list[CaseReport]]:
    """Group cases that did not pass by equal description, the most informative first. Excluded are
    cases that were given up before they began; their note has the reason.
    """
    failed = [case for case in cases if case.verdict != "pass" and case.replay]
    return grouped(most_telling_first(failed), _key)


def _key(case: CaseReport) -> Key:
    """Return the key of equal failures: the causes of a strategy, in any order. If a failure is
    unexplained, the key contains its whole description.
    """
    about = (case.case.strategy, case.case.backend, case.verdict)
    causes = tuple(found.cause for found in case.diagnosis)
    if not causes or "unexplained" in causes:
        return *about, *describe_failure(case)
    return *about, *sorted(causes)


def print_failure(case: CaseReport, console: Console) -> None:
    console.print()
    console.print(Text(f"  {case.case.workload} {case.case.dtype}", style="bold"))
    lines = LabeledLines(console, indent=_INDENT)
    for label, text in describe_failure(case):
        lines.add(label, text, most=None)
    lines.add("replay", case.replay, most=0)
    lines.print()


def describe_failure(case: CaseReport) -> list[tuple[str, str]]:
    """Describe a failed case as (label, text) pairs: ranks, first divergence, causes."""
    return list(_failure_lines(displayable(case)))


def _failure_lines(case: CaseReport) -> Iterator[tuple[str, str]]:
    yield from describe_rank_exits(case.outcomes)
    failed = [r for r in case.checks if r.verdict == "fail" and r.check != "outcome"]
    first = earliest_failure(failed)
    if first is not None and first.first is not None:
        yield (
            "first",
            f"{check_with_layer(first.check, first.layer)}: {describe_place(first.first)}",
        )
    if case.where is not None:
        yield "where", describe_site(case.where, case.strategy_file)
    for label, results in (
        ("why", failed),
        ("unknown", [r for r in case.checks if r.verdict == "unknown"]),
    ):
        by_reason: dict[str, list[str]] = {}
        for result in results:
            name = check_with_layer(result.check, result.layer)
            by_reason.setdefault(result.reason, []).append(name)
        for reason, names in by_reason.items():
            if reason:
                yield label, f"{', '.join(names)}: {reason}"
    for diagnosis in case.diagnosis:
        yield "cause", f"{diagnosis.cause}: {diagnosis.evidence}"
        yield from advice_lines(diagnosis.suggestion)


def describe_rank_exits(
    outcomes: Sequence[Outcome], *, lines: int = _DETAIL_LINES, says_cut: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield (label, text) pairs on how ranks ended that did not finish, in at most `lines` lines.
    Root causes are complete, and secondary failures are grouped.
    """
    alike = grouped(
        [one for one in outcomes if one.outcome != RankEnd.FINISHED],
        lambda one: (one.outcome, one.where if one.lost_peer else one.detail),
    )
    for (_, detail), ranks in alike.items():
        names = ", ".join(str(o.rank) for o in sorted(ranks, key=lambda o: o.rank))
        text = _shorten(detail.splitlines(), ranks[0].last_call, lines, says_cut=says_cut)
        end = RankEnd(ranks[0].outcome).in_words(text[0] if text else "", several=len(ranks) > 1)
        yield f"rank{'s' * (len(ranks) > 1)} {names}", "\n".join([end, *text[1:]])


def _shorten(detail: list[str], last_call: str, most: int, *, says_cut: bool) -> list[str]:
    """Return the first line, the last call, and the end of a rank's text, without the markers that
    Python prints below a line of code.
    """
    detail = [line for line in detail if not _MARKS.fullmatch(line)]
    if len(detail) <= most:
        return detail
    about = [line for line in detail[1:3] if line == last_call]
    left_out = f"  ... {len(detail) - most} more lines are in the JSON report ..."
    return [detail[0], *about, *[left_out] * says_cut, *detail[-most + 1 + len(about) :]]
