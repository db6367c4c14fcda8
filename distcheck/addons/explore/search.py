"""Draws cases in rounds and runs them; Hypothesis shrinks failures.

Each round is drawn twice from the same seed. The first pass only collects the cases, so that one
case can be judged while the next is trained. The second pass has their verdicts, so that Hypothesis
meets the failure where the case was drawn, and shrinks it. Verdicts are cached for the whole
search, because Hypothesis expects a failure to be reproducible, and a race condition is not.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy

from distcheck.addons.explore.running import Runner
from distcheck.addons.explore.space import MOST_WORLD, case_name
from distcheck.errors import DistcheckError
from distcheck.judge import sensitivity
from distcheck.machine.seeds import derive
from distcheck.records import Case, CaseReport, Delay
from distcheck.records.causes import APART

_FIRST_ROUND, _ROUND = 25, 100
_REPLAYS = 3  # of a finding, in fresh ranks
_LATE_MS = 200
_LEAST_SHRINKING_S = 60.0
_MOST_SHRINKING_CASES = 300


class _WrongError(Exception):
    """Raised for a case whose ranks finished with wrong results."""


class _RankFailedError(Exception):
    """Raised for a case in which a rank crashed or hung. Hypothesis shrinks this failure separately
    from wrong results.
    """


class _TimeIsUpError(BaseException):
    """Ends a search whose time is up. It is not an Exception, because Hypothesis would treat that
    as a failure of the case.
    """


@dataclass(frozen=True)
class Finding:
    """The smallest failing case, its report, and how often the case failed when it was replayed in
    new ranks. `unshrunk` is the reason why a smaller case may exist; empty if there is none.
    """

    report: CaseReport
    failed: int
    replays: int
    unshrunk: str = ""


@dataclass
class Search:
    """Runs one search. Its results so far can be read at any time, even after Ctrl-C.

    The search ends at `until`, a time of the monotonic clock in seconds, or after `most_cases`
    cases.
    """

    runner: Runner
    space: SearchStrategy[Case]
    seed: int
    until: float
    most_cases: int | None = None
    show: Callable[[str], None] = lambda text: None
    most_world: int = MOST_WORLD
    passed: list[Case] = field(default_factory=list)
    unknown: list[CaseReport] = field(default_factory=list)
    # Nothing differed, but some of the simplest errors would not have been detected.
    insensitive: list[CaseReport] = field(default_factory=list)
    finding: Finding | None = None
    once: list[CaseReport] = field(default_factory=list)  # failed in persistent ranks only
    shrunk_in: int = 0  # number of cases
    _verdicts: dict[str, CaseReport] = field(default_factory=dict)
    _failed: dict[str, CaseReport] = field(default_factory=dict)
    _last_failed: CaseReport | None = None

    @property
    def cases(self) -> list[Case]:
        return [report.case for report in self._verdicts.values()]

    @property
    def has_shown(self) -> bool:
        """True if a case with two or more ranks passed. A single rank does not communicate, so it
        shows nothing.
        """
        return any(case.world > 1 for case in self.passed)

    def again(self, kept: Sequence[Case]) -> None:
        """Run cases that an earlier search stored, and stop at the first one that still fails."""
        for case in kept:
            if self.runner.why_left_out(case):  # the strategy has changed since
                continue
            self.show(f"stored case {case.id}")
            if self._examine(case).verdict == "fail":
                self._conclude(self._verdicts[case.id], "", replays=1)
                return

    def run(self) -> None:
        """Draw and run cases until the budget is used up or a failure is found."""
        number = 0
        try:
            while self.finding is None and not self._used_up():
                before = len(self._verdicts)
                self._round(number)
                number += 1
                if len(self._verdicts) == before and number > 3:
                    return  # there is nothing new to draw
        except _TimeIsUpError:
            pass
        if self.finding is None and self._failed:
            self._conclude(min(self._failed.values(), key=_weight), "the time limit was reached")

    def give_up(self) -> None:
        """Keep the smallest failure found so far as the finding, without replays. Called after
        Ctrl-C.
        """
        if self.finding is None and self._failed:
            best = min(self._failed.values(), key=_weight)
            self.finding = Finding(best, 0, 0, "interrupted")

    def _used_up(self) -> bool:
        too_many = self.most_cases is not None and len(self._verdicts) >= self.most_cases
        return too_many or time.monotonic() >= self.until

    def _round(self, number: int) -> None:
        size = _FIRST_ROUND if number == 0 else _ROUND
        drawn: dict[str, Case] = {}
        self._draw(number, size, lambda case: drawn.setdefault(case.id, case))
        if not self._fails_among(
            [case for name, case in drawn.items() if name not in self._verdicts]
        ):
            return
        begun, already = time.monotonic(), len(self._verdicts)
        spare = max(self.until - begun, _LEAST_SHRINKING_S)
        until, most = begun + spare, already + _MOST_SHRINKING_CASES

        def fails_again(case: Case) -> None:
            if time.monotonic() > until or len(self._verdicts) > most:
                raise _TimeIsUpError
            report = self._examine(case)
            if report.verdict == "fail":
                self._last_failed = report
                if report.ranks_failed:
                    raise _RankFailedError
                raise _WrongError

        try:
            self._draw(number, size, fails_again)
        except (_WrongError, _RankFailedError):
            assert self._last_failed is not None
            self.shrunk_in = len(self._verdicts) - already
            self._conclude(self._last_failed, "")

    def _draw(self, number: int, size: int, examine: Callable[[Case], object]) -> None:
        @seed(derive(self.seed, "explore", number))
        @settings(
            max_examples=size,
            database=None,
            deadline=None,
            derandomize=False,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(self.space)
        def body(case: Case) -> None:
            examine(case)

        try:
            body()
        except HypothesisException as error:  # Hypothesis's own, none of distcheck's
            self.show(f"hypothesis stopped a round: {error}")

    def _fails_among(self, cases: list[Case]) -> bool:
        """Return True if one of the cases fails within the budget. Stops at the first failure."""
        while cases and not self._used_up():
            for report in self.runner.run_many(cases):
                cases = cases[1:]
                if report.verdict == "fail":
                    break
                self._add_report(report)
                if self._used_up():
                    return False
            else:
                return False
            if self._add_report(report).verdict == "fail":
                return True
        return False

    def _examine(self, case: Case) -> CaseReport:
        """Return the cached report of a case, or run it."""
        known = self._verdicts.get(case.id)
        return known if known is not None else self._add_report(self.runner.run(case))

    def _add_report(self, report: CaseReport) -> CaseReport:
        """Record a report, after confirming the first failure."""
        case = report.case
        if report.verdict == "fail" and not self._failed and not self.runner.distrusts_kept:
            report = self._confirm_failure(report)
        self._verdicts[case.id] = report
        if report.verdict == "fail":
            self._failed[case.id] = report
        elif report.verdict == "unknown":
            could_not_show = sensitivity.only_unrevealed_mistakes(report.checks)
            (self.insensitive if could_not_show else self.unknown).append(report)
        else:
            self.passed.append(case)
        what = "shrinking" if self._failed else "searching"
        self.show(f"{what}: {len(self._verdicts)} cases; {case.workload}, world {case.world}")
        return report

    def _confirm_failure(self, report: CaseReport) -> CaseReport:
        """Confirm the first failure in new ranks or, if the case passes there, in new persistent
        ranks. Return the report of the confirmed failure, else the report of the new ranks. If the
        case fails only when it runs twice in one process, the search uses only new ranks from now
        on.
        """
        case = report.case
        fresh = self.runner.run_fresh(case)
        if fresh.verdict == "fail":
            return fresh
        once = msgspec.structs.replace(case, rerun=False)  # a rerun would already be a second use
        alone, after = self.runner.run(once), self.runner.run(once)
        if alone.verdict == "fail":
            return report
        if after.verdict == "fail":
            self.runner.distrusts_kept = (
                "the strategy cannot be used twice in one process; every case ran on fresh ranks"
            )
            return fresh
        if case.rerun and self.runner.run(case).verdict == "fail":
            return report
        replays = self.runner.replay(case, _REPLAYS - 1)
        if any(replay.verdict == "fail" for replay in replays):
            return report
        self.once.append(report)
        return fresh

    def _conclude(self, report: CaseReport, unshrunk: str, *, replays: int = _REPLAYS) -> None:
        """Replay the finding in new ranks, as `distcheck replay` does."""
        self.show("replaying the failure")
        self.finding = self._replay_finding(report, unshrunk, replays)
        if self.finding.failed == replays and report.case.world == 1:
            self.finding = self._with_distinct_cause(self.finding)
        for case in _steadier(report.case) if self.finding.failed < replays else ():
            steadier = self._replay_finding(
                msgspec.structs.replace(report, case=case), unshrunk, replays
            )
            if steadier.failed == replays:
                self.finding = steadier
                return

    def _with_distinct_cause(self, alone: Finding) -> Finding:
        """Return the finding, or the same case in the smallest world of several ranks that shows a
        different cause. A single rank can show neither the rank that is wrong nor an effect of
        communication.
        """
        case, named = alone.report.case, _causes(alone.report)
        if alone.report.ranks_failed:
            return alone
        for world in range(2, self.most_world + 1):
            larger = msgspec.structs.replace(case, world=world, batch=case.batch * world)
            larger = msgspec.structs.replace(larger, id=case_name(larger))
            report = msgspec.structs.replace(alone.report, case=larger)
            try:
                found = self._replay_finding(report, alone.unshrunk, alone.replays)
            except DistcheckError:
                continue  # such a world cannot run here
            causes = _causes(found.report)
            if found.failed == found.replays and causes and causes != named:
                return found
            if causes and causes == named:
                return alone
        return alone

    def _replay_finding(self, report: CaseReport, unshrunk: str, replays: int) -> Finding:
        seen = self.runner.replay(report.case, replays)
        failed = [replay for replay in seen if replay.verdict == "fail"]
        return Finding(failed[0] if failed else report, len(failed), len(seen), unshrunk)


def _steadier(case: Case) -> Iterator[Case]:
    """Yield the case with longer delays. Shrinking keeps the shortest delay that exposes a race
    condition, or none, so that the failure may occur only sometimes.
    """
    if case.world == 1:
        return
    late: list[tuple[Delay, ...]] = []
    if case.delays:
        late = [tuple(msgspec.structs.replace(d, ms=d.ms + _LATE_MS) for d in case.delays)]
    for rank in dict.fromkeys((1, case.world - 1, 0)):
        late += [(Delay(rank=rank, collective=n, ms=_LATE_MS),) for n in (0, 1)]
    for delays in late:
        changed = msgspec.structs.replace(case, delays=delays, rerun=True)
        yield msgspec.structs.replace(changed, id=case_name(changed))


def _causes(report: CaseReport) -> set[str]:
    named = [found for found in report.diagnosis if found.cause != "unexplained"]
    if any(APART in found.evidence for found in named):
        return set()
    return {found.cause for found in named}


def _weight(report: CaseReport) -> tuple[int, ...]:
    """Return a sort key that orders reports by the complexity of their cases. It is used if
    Hypothesis had no time to shrink.
    """
    case = report.case
    layers = case.workload.count("-")
    return (layers, case.world, case.steps, len(case.delays), len(case.workload), case.batch)
