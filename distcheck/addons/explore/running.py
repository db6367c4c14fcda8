"""Runs cases in processes that serve many cases, as long as these processes are reliable. Failures
are confirmed in new ranks.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from distcheck.addons.explore.messages import (
    JUDGE,
    PAIRS,
    SERVE,
    TRACE_BYTES,
    TRACES,
    JudgeCase,
    TrainCase,
)
from distcheck.contract import Contract
from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.plan.declined import declinable_words, declined_words
from distcheck.records import Adaptation, Case, CaseReport, Outcome
from distcheck.records.generated_words import EXPLORED_DTYPES
from distcheck.verification import preparation
from distcheck.verification.preparation import SharedDataset
from distcheck.verification.run import run_cases
from distcheck.worlds import root_cause
from distcheck.worlds.launch import Ranks, reported_error
from distcheck.worlds.pool import Pool
from distcheck.worlds.shares import Shared
from distcheck.worlds.worker_pool import WorkerPool

_JUDGE_DEADLINE_S = 120.0


class WorkerRanks:
    """Trains and judges cases one after another in persistent processes. Close it after use."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._worlds: dict[int, WorkerPool] = {}
        self._judge: WorkerPool | None = None
        self._waiting: deque[Case] = deque()  # at the judge, in order
        self._traces = [os.memfd_create("distcheck-explored") for _ in range(2 * PAIRS)]

    def run(self, judge_cases: Iterable[JudgeCase]) -> Iterator[CaseReport]:
        """Yield the reports of the cases, in order. While the judge examines one case, the ranks
        train the next. When a case fails, the ranks are therefore already training another one, and
        are ended. Raises errors of the code under test that are addressed to the user.
        """
        while self._waiting:  # of a caller that abandoned the rest
            self._verdict()
        for number, judge_case in enumerate(judge_cases):
            case, pair = judge_case.case, number % PAIRS
            failed = self._record(case, pair)
            if not failed:
                judge = self._judge = self._judge or self._start_judge()
                judge.ask(msgspec.structs.replace(judge_case, pair=pair))
                self._waiting.append(case)
            while len(self._waiting) > (0 if failed else PAIRS - 1):
                yield self._verdict()
            if failed:
                yield CaseReport(
                    case=case, strategy_file="", verdict="fail", outcomes=tuple(failed), checks=()
                )
        while self._waiting:
            yield self._verdict()

    def _verdict(self) -> CaseReport:
        """Return the judge's report on the oldest case that is not judged yet."""
        assert self._judge is not None
        case = self._waiting.popleft()
        answer = self._judge.wait(_JUDGE_DEADLINE_S)
        if answer is None:
            error = reported_error(self._judge.world.children[0])
            self._judge.close()
            self._judge = None
            self._waiting.clear()
            raise CannotRunError(f"the judge of {case.workload} failed: {error}")
        report = msgspec.msgpack.decode(answer, type=CaseReport)
        if report.verdict == "fail":
            self.forget(case.world)
        return report

    def _record(self, case: Case, pair: int) -> list[Outcome]:
        """Train and record a case. Return an empty list on success, or how each rank ended."""
        for fd in self._traces[2 * pair : 2 * pair + 2]:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, TRACE_BYTES)
        failed = self._train(TrainCase(case=case, pair=pair))
        if not failed and case.rerun:
            failed = self._train(TrainCase(case=case, pair=pair, again=True))
        return failed

    def train(self, case: Case) -> None:
        """Train a case without recording it, to measure the base cost."""
        self._train(TrainCase(case=case, bare=True))

    def forget(self, world: int) -> None:
        """End the ranks of this world size. The next case starts new ones."""
        if world in self._worlds:
            self._worlds.pop(world).close()

    def close(self) -> None:
        for world in list(self._worlds):
            self.forget(world)
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        while self._traces:
            os.close(self._traces.pop())

    def _train(self, turn: TrainCase) -> list[Outcome]:
        """Send one request to the ranks. Return [] on success, or how each rank ended."""
        case = turn.case
        if case.world not in self._worlds:
            self._worlds[case.world] = self._start_world(case)
        kept = self._worlds[case.world]
        kept.ask(turn)
        if kept.wait(case.deadline_s) is not None:
            return []
        children = kept.world.children
        refused = [c for c in children if c.raised and c.raised.exit_code == ExitCode.USAGE]
        error: DistcheckError | None = reported_error(refused[0]) if refused else None
        outcomes = root_cause.rank_outcomes(children, hung=kept.world.hung)
        self.forget(case.world)
        if error is not None:
            raise error
        return outcomes

    def _start_world(self, case: Case) -> WorkerPool:
        fds = {name: Shared(fd=fd) for name, fd in zip(TRACES, self._traces, strict=True)}

        ranks = Ranks(
            job=SERVE,
            backend="gloo",
            size=case.world,
            request=lambda rendezvous: rendezvous,
            deadline_s=case.deadline_s,
        )
        return WorkerPool.of_ranks(self._pool, ranks, fds)

    def _start_judge(self) -> WorkerPool:
        fds = dict(zip(TRACES, self._traces, strict=True))
        return WorkerPool.of_job(self._pool, JUDGE, b"", fds, _JUDGE_DEADLINE_S)


class Runner:
    """Runs cases and returns their reports. Properties of the strategy are determined once per
    search.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept = WorkerRanks(pool)
        self._contracts: dict[Adaptation, Contract] = {}
        self._files: dict[Adaptation, str] = {}
        self._declined: dict[Adaptation, dict[str, str]] = {}
        self._calibrated: dict[tuple[int, Contract], str] = {}
        self.distrusts_kept = ""  # why ranks are no longer reused

    def look_at(self, samples: Sequence[Case]) -> None:
        """Load the strategy with each adaptation that `samples` contains, and determine its
        properties. Raises DistcheckError.
        """
        facts = preparation.inspect(self._pool, samples, SharedDataset())
        for case, about in zip(samples, facts.cases, strict=True):
            contract = about.contract
            if contract.parallel:
                raise CannotRunError(
                    f"{case.strategy} promises a mesh and shards the layers of specific models; "
                    "explore generates other models"
                )
            if contract.backend not in (None, "gloo") or contract.device not in (None, "cpu"):
                raise CannotRunError(
                    f"strategy {case.strategy} works only on "
                    f"{contract.backend or contract.device}, but explore uses gloo on the CPU; "
                    "use distcheck verify"
                )
            self._contracts[case.adaptation] = contract
            self._files[case.adaptation] = about.strategy_file
            self._declined[case.adaptation] = declined_words(
                contract, own_backward=about.own_backward, own_update=about.own_update
            )

    @property
    def left_out(self) -> dict[str, str]:
        """Features that no case may have, each with the reason; the first reason if adaptations
        differ.
        """
        found: dict[str, str] = {}
        for declined in self._declined.values():
            found = declined | found
        return found

    def why_left_out(self, case: Case) -> str:
        """Return the reason why the strategy does not support a case; empty if it does."""
        words = declinable_words(case.workload)
        if words and case.adaptation not in self._declined:
            self.look_at([case])
        declined = self._declined.get(case.adaptation, {})
        return next((why for word, why in declined.items() if word in words), "")

    def run(self, case: Case) -> CaseReport:
        """Run one case, in persistent ranks if they are reliable."""
        return next(self.run_many([case]))

    def run_many(self, cases: Iterable[Case]) -> Iterator[CaseReport]:
        """Yield the reports of cases, in order. The caller may stop early."""
        if self.distrusts_kept:
            yield from map(self.run_fresh, cases)
            return
        for report in self._kept.run(map(self._judge_case, cases)):
            file = self._files[report.case.adaptation]
            yield msgspec.structs.replace(report, strategy_file=file)

    def _judge_case(self, case: Case) -> JudgeCase:
        if case.adaptation not in self._contracts:
            self.look_at([case])
        contract = self._contracts[case.adaptation]
        failure = self._calibration_failure(case, contract)
        return JudgeCase(case=case, contract=contract, calibration_failure=failure)

    def run_fresh(self, case: Case) -> CaseReport:
        """Run a case in new ranks, as `distcheck replay` does."""
        return self.replay(case, 1)[0]

    def replay(self, case: Case, times: int) -> list[CaseReport]:
        """Run a case several times in new ranks. Each repetition is a separate run, because a run
        leaves out all cases after a hang.
        """
        alike = [msgspec.structs.replace(case, id=f"{case.id}-{n}") for n in range(times)]
        reports = [report for one in alike for report in run_cases([one], self._pool).cases]
        return [msgspec.structs.replace(report, case=case) for report in reports]

    def train(self, case: Case) -> None:
        """Train a case in persistent ranks, without recording or judging."""
        self._kept.train(case)

    def close(self) -> None:
        self._kept.close()

    def _calibration_failure(self, case: Case, contract: Contract) -> str:
        key = (case.world, contract)
        if key not in self._calibrated:
            found = ""
            if case.world > 1 and isinstance(contract.order, preparation.TO_CONFIRM):
                found = preparation.calibrate(
                    self._pool,
                    backend=case.backend,
                    world=case.world,
                    orders=(contract.order,),
                    dtypes=(contract.wire,) if contract.wire else EXPLORED_DTYPES,
                    deadline_s=max(case.deadline_s, 30.0),
                ).failure(contract)
            self._calibrated[key] = found
        return self._calibrated[key]
