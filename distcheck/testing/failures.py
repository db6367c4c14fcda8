"""Merges failures of ranks: root causes first, identical ones once, secondary in one line."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.records.odd_ranks import grouped
from distcheck.testing.messages import RankReport, Subtest
from distcheck.testing.pytest_compat import (
    ExceptionChainRepr,
    ReprEntry,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)


class WorldFailure(Exception):  # noqa: N818 - what pytest calls a failure
    """A test that failed on at least one rank. The pytest process raises it.

    It is also an instance of the type that the rank raised, so that `xfail(raises=...)` and
    Hypothesis see the type that a single process would raise. `longrepr` is the report of all
    ranks.
    """

    longrepr: ReprExceptionInfo | None = None


@dataclass(frozen=True, kw_only=True)
class WorldEnd:
    """End of a world: `outcomes` with root causes first, and the report and output of each rank.
    `subtests` are (rank, subtest) in the order of their reports.
    """

    size: int
    outcomes: Sequence[Outcome]
    reports: dict[int, RankReport]
    outputs: dict[int, str]
    subtests: Sequence[tuple[int, Subtest]] = ()
    timeout: str = ""


# Ends of a rank without a result: phrases for the rank and for the advice.
_LEFT_OUT = {"skipped": ("skipped", "skip"), "rejected": ("rejected the example", "reject")}
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
_Entry = ReprEntry | ReprEntryNative
_types: dict[tuple[str, ...], type[WorldFailure]] = {}


def failure_of(ended: WorldEnd, config: pytest.Config) -> WorldFailure:
    longrepr = longrepr_of(ended, config)
    groups = _groups(ended)
    reports = [ended.reports.get(ranks[0]) for ranks, _ in groups]
    failure = _type_for(reports)(f"{_headline(ended, groups)}\n{longrepr}")
    failure.longrepr = longrepr
    return failure


def longrepr_of(ended: WorldEnd, config: pytest.Config) -> ReprExceptionInfo:
    entries: list[_Entry] = [_line(ended.timeout)] if ended.timeout else []
    groups = _groups(ended)
    crash: ReprFileLocation | None = None
    for ranks, outcome in groups:
        report = ended.reports.get(ranks[0])
        verb, details = _verb(outcome, report, len(ranks)), _details_of(outcome)
        end, (first, _, rest) = verb.split()[-1], details.partition("\n")
        if first.startswith(f"{end} "):
            verb, details = verb + first.removeprefix(end), rest
        longrepr = None if report is None else report.longrepr
        colon = ":" if longrepr is not None or details else ""
        entries.append(_line(f"{ranks_phrase(ranks, ended.size)} {verb}{colon}"))
        if longrepr is not None:
            found, place = _entries_of(longrepr, config)
            entries += found
            crash = crash or place
        elif details:
            entries.append(ReprEntryNative([f"{details}\n"]))
    entries += [_line(text) for text in _secondary(ended)]
    headline = _headline(ended, groups)
    place = crash or ReprFileLocation(path="", lineno=0, message="")
    place = ReprFileLocation(path=place.path, lineno=place.lineno, message=headline)
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback(reprentries=entries, extraline=None, style="long"),
        reprcrash=place,
    )


def why_ranks_disagree(ended: WorldEnd) -> str:
    """Return the error message if only some ranks skip the test or reject the example; else ""."""
    ranks_left_out = [rank for rank, one in sorted(ended.reports.items()) if one.end in _LEFT_OUT]
    left_out = grouped(ranks_left_out, lambda rank: ended.reports[rank].end)
    told = [
        f"{ranks_phrase(ranks, ended.size)} {_LEFT_OUT[end][0]} ({ended.reports[ranks[0]].reason})"
        for end, ranks in left_out.items()
    ]
    known = {rank for ranks in left_out.values() for rank in ranks}
    if others := [rank for rank in range(ended.size) if rank not in known]:
        told.append(f"{ranks_phrase(others, ended.size)} did not")
    what = " or ".join(_LEFT_OUT[end][1] for end in left_out)
    return f"{', '.join(told)}; {what} on every rank or on none"


def exception_class(name: str) -> type[BaseException] | None:
    """Return the class with the name "module:qualified name", if it is loaded here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _groups(ended: WorldEnd) -> list[tuple[list[int], Outcome]]:
    """Return groups of ranks with the same primary failure; root causes first."""
    found: dict[tuple[str, str, str], tuple[list[int], Outcome]] = {}
    for outcome in ended.outcomes:
        if outcome.outcome in (RankEnd.FINISHED, RankEnd.ENDED) or _is_victim(outcome):
            continue
        report = ended.reports.get(outcome.rank)
        told = report is not None and report.longrepr is not None
        if report is not None and told:
            key = (report.exception, report.where, _NUMBER.sub("#", report.message))
        else:
            key = (outcome.outcome, "", _NUMBER.sub("#", outcome.detail))
        found.setdefault(key, ([], outcome))[0].append(outcome.rank)
    groups = list(found.values())
    if not groups:  # every rank lost a peer: the first is shown
        groups = [([o.rank], o) for o in ended.outcomes if o.outcome != RankEnd.FINISHED][:1]
    return groups


def _details_of(outcome: Outcome) -> str:
    """Return the details of a rank's end, without the training step, which a test does not have."""
    return (
        outcome.circumstances
        if outcome.phase == "test" and outcome.circumstances
        else outcome.detail
    )


def _is_victim(outcome: Outcome) -> bool:
    return outcome.outcome == RankEnd.RAISED and outcome.lost_peer


def _secondary(ended: WorldEnd) -> list[str]:
    lines = []
    victims: dict[str, list[int]] = {}
    told = {rank for ranks, _ in _groups(ended) for rank in ranks}
    for outcome in (o for o in ended.outcomes if _is_victim(o) and o.rank not in told):
        victims.setdefault(outcome.lost_at, []).append(outcome.rank)
    for where, ranks in victims.items():
        lines.append(f"{ranks_phrase(ranks, ended.size)} lost a peer{where}: secondary failure")
    for outcome in ended.outcomes:
        if outcome.outcome == RankEnd.ENDED:
            where = f" ({outcome.last_call})" if outcome.call else ""
            lines.append(
                f"{ranks_phrase([outcome.rank], ended.size)} was terminated with them{where}"
            )
    silent = any(
        outcome.outcome in (RankEnd.HUNG, RankEnd.KILLED, RankEnd.EXITED)
        for outcome in ended.outcomes
    )
    rejected = any(report.end == "rejected" for report in ended.reports.values())
    return lines + (_had_ended(ended) if ended.timeout or silent or rejected else [])


def _had_ended(ended: WorldEnd) -> list[str]:
    """Return lines about finished ranks, whose end may have blocked the others."""
    found: dict[str, list[int]] = {}
    for outcome in ended.outcomes:
        report = ended.reports.get(outcome.rank)
        if outcome.outcome == RankEnd.FINISHED and report is not None:
            left_out = report.end in _LEFT_OUT
            how = f"{_LEFT_OUT[report.end][0]} ({report.reason})" if left_out else "finished"
            found.setdefault(how, []).append(outcome.rank)
    return [f"{ranks_phrase(ranks, ended.size)} had {how}" for how, ranks in found.items()]


def _headline(ended: WorldEnd, groups: Sequence[tuple[list[int], Outcome]]) -> str:
    if not groups:
        return ended.timeout or "the world failed"
    ranks, outcome = groups[0]
    report = ended.reports.get(ranks[0])
    what = report.message if report is not None and report.message else outcome.outcome
    if report is None or not report.message:
        what += f" {_last_line(outcome)}" if _last_line(outcome) else ""
    return f"{ranks_phrase(ranks, ended.size)}: {what}"


def _last_line(outcome: Outcome) -> str:
    line = outcome.reason or outcome.last_call
    return f"({line})" if line else ""


def ranks_phrase(ranks: Sequence[int], size: int) -> str:
    """Return a phrase such as "rank 1 of 4", "ranks 0, 2 of 4", "all 4 ranks"."""
    if len(ranks) == size and size > 1:
        return f"all {size} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))} of {size}"


def _verb(outcome: Outcome, report: RankReport | None, count: int) -> str:
    if report is not None and report.longrepr is not None:
        return "failed"
    return RankEnd(outcome.outcome).in_words(several=count > 1)


def _line(text: str) -> ReprEntryNative:
    return ReprEntryNative([f"{text}\n"])


def _entries_of(
    data: dict[str, Any], config: pytest.Config
) -> tuple[list[_Entry], ReprFileLocation | None]:
    """Return a rank's own report, as serialized by pytest, as entries that can be merged."""
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    longrepr = report.longrepr
    if isinstance(longrepr, ExceptionChainRepr):
        entries: list[_Entry] = []
        for traceback, _, description in longrepr.chain:
            entries += traceback.reprentries  # type: ignore[arg-type]
            if traceback.extraline and "entries are hidden" not in traceback.extraline:
                entries.append(_line(traceback.extraline))
            if description:
                entries.append(_line(description))
        return entries, longrepr.reprcrash
    return [_line(str(longrepr))], None


def _type_for(reports: Sequence[RankReport | None]) -> type[WorldFailure]:
    """Return a separate type for every kind and place of failure, by which Hypothesis distinguishes
    bugs.

    If ranks failed in different ways, it also derives from their common base class:
    `xfail(raises=...)` for one rank's failure must not hide the others'.
    """
    cause = reports[0] if reports else None
    if cause is None or not cause.exception:
        return WorldFailure
    kinds = tuple(report.exception if report is not None else "" for report in reports)
    key = (cause.where, *dict.fromkeys(kinds))
    if key not in _types:
        bases = [exception_class(kind) for kind in dict.fromkeys(kinds)]
        name = cause.exception.rpartition(":")[2].rpartition(".")[2]
        _types[key] = _subclass(name, _common(bases))
    return _types[key]


def _common(kinds: Sequence[type[BaseException] | None]) -> type[BaseException] | None:
    """Return the nearest common base class of `kinds`; None if one is unknown."""
    first, *others = kinds
    known = [kind for kind in others if kind is not None]
    if first is None or len(known) < len(others):
        return None
    return next(base for base in first.__mro__ if all(issubclass(kind, base) for kind in known))


def _subclass(name: str, base: type[BaseException] | None) -> type[WorldFailure]:
    if base is not None and issubclass(base, Exception):
        try:
            of_a_text = {"__init__": Exception.__init__, "__str__": Exception.__str__}
            kind = type(name, (WorldFailure, base), of_a_text)
            kind("tried")
        except TypeError:  # a class that cannot be mixed, or needs other arguments
            pass
        else:
            return kind
    return type(name, (WorldFailure,), {})
