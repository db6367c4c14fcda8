"""Summaries of cases that did not pass, for formats with a few lines each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distcheck.judge.checks.merging import earliest_failure
from distcheck.records import Origin, ranks_failed
from distcheck.records.exit_status import RankEnd
from distcheck.records.layers import named
from distcheck.reports.document import CaseEntry
from distcheck.reports.wording import describe_site


@dataclass(frozen=True)
class FailureSummary:
    """The summary of a case that did not pass; texts may be empty."""

    headline: str  # one line
    first: str  # the first divergence, or missing coverage
    where: str  # the line that the causes concern
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]
    ranks: tuple[tuple[str, str], ...]  # of failed ranks: "rank 2 raised", and the detail
    replay: str  # independent of the files of the machine


def name_of(case: CaseEntry) -> str:
    """Return the distinguishing properties of a cell, except the strategy."""
    device = "" if case.device == "cpu" else f", {case.device}"
    seed = f", seed {case.seed}" if case.seed else ""
    about = f"world {case.world}, {case.backend}{device}, {case.workload} {case.dtype}"
    return about + seed


def names_of(cases: Sequence[CaseEntry]) -> list[str]:
    """Return names of cells that are unique per strategy, with the id if necessary."""
    names = [(case.strategy, name_of(case)) for case in cases]
    times = Counter(names)
    return [
        name if times[strategy, name] == 1 else f"{name}, {case.id}"
        for (strategy, name), case in zip(names, cases, strict=True)
    ]


def finding_of(case: CaseEntry) -> FailureSummary:
    """Return the summary of a case."""
    failed = [(f"rank {o.rank} {o.outcome}", o.detail) for o in case.outcomes
              if o.outcome != RankEnd.FINISHED]  # fmt: skip
    check = earliest_failure(case.checks) or earliest_failure(case.checks, "unknown")
    first = ""
    if check is not None:
        first = f"{named(check.check, check.layer)}: {check.reason or check.verdict}"
    headline = (
        failed[0][0] if ranks_failed(case) else first or "; ".join(case.notes) or case.verdict
    )
    return FailureSummary(
        headline=" ".join(headline.split()),
        first=first,
        where=describe_site(case.where or None, case.strategy_file),
        causes=tuple(f"{d.cause}: {d.evidence}" for d in case.diagnosis),
        suggestions=tuple(d.suggestion for d in case.diagnosis if d.suggestion),
        ranks=tuple(failed),
        replay=case.command or case.replay,
    )


def describe_origin(made: Origin | None) -> str:
    """Return the origin of a report in a line: date, commit and command; "" if not recorded."""
    if made is None:
        return ""
    state = {True: "", False: " with changes", None: " (changes not known)"}[made.clean]
    parts = [made.date.replace("T", " ")]
    parts += [f"commit {made.commit[:12]}{state}"] if made.commit else []
    parts += [made.command] if made.command else []
    return " · ".join(parts)
