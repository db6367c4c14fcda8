"""Runs the search of `--thorough` after a strategy's cases, and adds its results to the report."""

import re
import time
from collections.abc import Callable, Collection, Sequence
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from distcheck.addons.explore.failure_database import FailureDatabase
from distcheck.errors import CannotRunError, DistcheckError
from distcheck.plan import cases as plan
from distcheck.plan.declined import notes_on_words, words_of_cells
from distcheck.plan.settings import Request
from distcheck.plan.thorough import ThoroughSearch as Asked
from distcheck.records import Case, CaseReport
from distcheck.records.generated_words import EXPLORED_DTYPES
from distcheck.records.run_facts import ExploredSearch
from distcheck.worlds.pool import Pool

if TYPE_CHECKING:
    from distcheck.addons.explore.search import Finding, Search

_MOST_DEADLINE_S = 3.0  # as in `distcheck explore`: findings are confirmed by replays
_BACKEND = "gloo"
_MOST_UNKNOWN = 3  # shown in the report
_AFTER_FAILURE = "not searched: its cases already fail"
_FLOAT64_ALONE = "its code computes only in float32"

Enter = Callable[[ExploredSearch, Sequence[CaseReport]], None]


def search_thoroughly(
    pool: Pool,
    searches: Sequence[Asked],
    reports: Sequence[CaseReport],
    left_out: Collection[str],
    *,
    keep: bool,
    show: Callable[[str], None],
    enter: Enter,
) -> None:
    """Run the searches one after another, and pass each result to `enter` with the cases that it
    adds.

    `reports` are the reports of the strategy's cases, and `left_out` the ids of cases to ignore.
    With `keep`, findings are stored and run first the next time. On Ctrl-C, the results so far are
    passed on, and KeyboardInterrupt is raised again.
    """
    for asked in searches:
        own = [report for report in reports if report.case.strategy == asked.strategy]
        counting = [report for report in own if report.case.id not in left_out]
        why_not = asked.why_not
        if any(report.verdict == "fail" for report in counting):
            why_not = why_not or _AFTER_FAILURE
        if why_not:
            about = ExploredSearch(
                strategy=asked.strategy, verdict="not run", budget_s=asked.budget_s, reason=why_not
            )
            enter(about, ())
            continue
        without = _excluded_words(asked, own, left_out)
        world = own[0].case.world if own else 4
        _explore(pool, asked, without, world, keep=keep, show=show, enter=enter)


def _excluded_words(
    asked: Asked, reports: Sequence[CaseReport], left_out: Collection[str]
) -> dict[str, str]:
    """Return the features that are not drawn, each with the reason: the user excluded them, or the
    strategy's cases do not support them.
    """
    found = {word: f"you passed --without {cell}" for word, cell in words_of_cells(asked.without)}
    if asked.dtypes:
        others = [name for name in EXPLORED_DTYPES if name not in asked.dtypes]
        found |= dict.fromkeys(others, "a different dtype was requested")
    if any(report.case.id in left_out for report in reports):
        found |= {name: _FLOAT64_ALONE for name in EXPLORED_DTYPES if name != "float32"}
    if any(report.case.workload == "exact:no-scalar" for report in reports):
        found["scale"] = "its code does not support scalar (0-d) parameters"
    return found


def _explore(
    pool: Pool,
    asked: Asked,
    without: dict[str, str],
    world: int,
    *,
    keep: bool,
    show: Callable[[str], None],
    enter: Enter,
) -> None:
    from distcheck.addons.explore.command import prepare_hypothesis

    prepare_hypothesis()
    from distcheck.addons.explore.running import Runner
    from distcheck.addons.explore.search import Search
    from distcheck.addons.explore.space import MOST_STEPS, MOST_WORLD, cases

    deadline_s = min(asked.deadline_s, _MOST_DEADLINE_S)
    kept = FailureDatabase(asked.strategy)
    begun = time.monotonic()
    runner = Runner(pool)
    search = Search(
        runner=runner,
        space=cases(asked.strategy),
        seed=asked.seed,
        until=begun + asked.budget_s,
        show=lambda text: show(f"explore {asked.strategy}: {text}"),
    )
    about = ExploredSearch(
        strategy=asked.strategy, verdict="unknown", budget_s=asked.budget_s, seed=asked.seed,
        most_world=MOST_WORLD, most_steps=MOST_STEPS,
    )  # fmt: skip

    def over(reason: str = "") -> None:
        spent_s = time.monotonic() - begun
        left = {**without, **runner.left_out}
        found, added = _summarize_search(search, about, spent_s, left, kept if keep else None)
        if reason:
            verdict = "fail" if found.verdict == "fail" else "unknown"
            found = msgspec.structs.replace(found, verdict=verdict, reason=reason)
        enter(found, added)

    try:
        try:
            runner.look_at([_sample(asked, world)])
        except CannotRunError as error:  # another backend or device, or a mesh
            reason = f"not searched: {error}"
            enter(msgspec.structs.replace(about, verdict="not run", reason=reason), ())
            return
        search.space = cases(
            asked.strategy,
            adaptation=asked.adaptation,
            without=(*without, *runner.left_out),
            loss=asked.loss,
            deadline_s=deadline_s,
        )
        search.until = max(search.until, time.monotonic() + min(1.0, asked.budget_s))
        search.again([case for case in kept.read() if _is_of(case, asked, without)] if keep else [])
        if search.finding is None:
            search.run()
    except KeyboardInterrupt:  # ranks may have been interrupted within a message
        search.give_up()
        over("interrupted")
        raise
    except DistcheckError as error:
        search.give_up()
        over(f"the search stopped early: {error}")
    else:
        over()
    runner.close()


def _is_of(case: Case, asked: Asked, without: Collection[str]) -> bool:
    """Return True if a stored case belongs to the current search space."""
    words = {*re.findall("[a-z]+", case.workload), case.dtype}
    alike = case.adaptation == asked.adaptation and case.backend == _BACKEND
    return alike and not words & {*without}


def _sample(asked: Asked, world: int) -> Case:
    request = Request(
        strategies=(asked.strategy,),
        worlds=(world,),
        workloads=("generated:linear1",),
        dtype="float32",
        loss=asked.loss,
        adaptation=asked.adaptation,
        separate=False,
    )
    (case,) = plan.plan_cases(request)
    return case


def _summarize_search(
    search: "Search",
    about: ExploredSearch,
    spent_s: float,
    left_out: dict[str, str],
    kept: FailureDatabase | None,
) -> tuple[ExploredSearch, list[CaseReport]]:
    finding = search.finding
    added = list(search.once[:1]) if finding is None else [_report_of_finding(finding, kept)]
    failed = bool(added)
    added += search.unknown[:_MOST_UNKNOWN]
    reason = ""
    if not added and not search.passed:
        reason = "no case passed" if search.cases else "no case was run within the budget"
    elif not added and not search.has_shown:
        reason = "every case that passed has only one rank, which has nothing to synchronize"
    found = msgspec.structs.replace(
        about,
        verdict="fail"
        if failed
        else "pass"
        if search.has_shown and not search.unknown
        else "unknown",
        spent_s=round(spent_s, 3),
        cases=len(search.cases),
        passed=len(search.passed),
        insensitive=len(search.insensitive),
        found=tuple(report.case.id for report in added),
        left_out=left_out,
        reason=reason,
    )
    return found, added


def _report_of_finding(finding: "Finding", kept: FailureDatabase | None) -> CaseReport:
    report = finding.report
    notes = ["found by explore: no smaller failing case was found"]
    if finding.replays and finding.failed < finding.replays:
        notes.append(
            f"it failed in only {finding.failed} of {finding.replays} replays: a race condition"
        )
    if finding.unshrunk:
        notes.append(f"a smaller failing case may exist: {finding.unshrunk}")
    notes += notes_on_words(report.case)
    path = None if kept is None else kept.keep(report.case)
    replay = report.case.command_line if path is None else f"distcheck replay {quote(str(path))}"
    return msgspec.structs.replace(report, replay=replay, notes=(*report.notes, *notes))
