"""What went wrong with a case, in the words of its JSON: for formats that have a few lines each."""

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
    """The gist of a case that did not pass. Empty texts where there is nothing to say."""

    headline: str  # one line
    first: str  # the first divergence, or what was not compared
    where: str  # the line that the causes are about
    causes: tuple[str, ...]
    suggestions: tuple[str, ...]
    ranks: tuple[tuple[str, str], ...]  # of those that failed: "rank 2 raised", and the detail
    replay: str  # a line that needs no file of the machine that ran the case


def name_of(case: CaseEntry) -> str:
    """What tells a cell from the others, the strategy aside."""
    device = "" if case.device == "cpu" else f", {case.device}"
    seed = f", seed {case.seed}" if case.seed else ""
    about = f"world {case.world}, {case.backend}{device}, {case.workload} {case.dtype}"
    return about + seed


def names_of(cases: Sequence[CaseEntry]) -> list[str]:
    """Names of cells that no two of a strategy share: with the id where `name_of` is not enough."""
    names = [(case.strategy, name_of(case)) for case in cases]
    times = Counter(names)
    return [
        name if times[strategy, name] == 1 else f"{name}, {case.id}"
        for (strategy, name), case in zip(names, cases, strict=True)
    ]


def finding_of(case: CaseEntry) -> FailureSummary:
    """What a person reads first of a case."""
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
    """Where a report comes from, in a line: its date, its commit and its command; "" where it was
    made before these were recorded.
    """
    if made is None:
        return ""
    state = {True: "", False: " with changes", None: " (changes not known)"}[made.clean]
    parts = [made.date.replace("T", " ")]
    parts += [f"commit {made.commit[:12]}{state}"] if made.commit else []
    parts += [made.command] if made.command else []
    return " · ".join(parts)
