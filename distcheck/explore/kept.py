"""The front's side of kept ranks: a world of each size, one judge, one pair of traces.

A case costs a message to each rank and one to the judge, who is at work while the ranks train the
next. After any failure the ranks that met it
are thrown away: their state is not trusted.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.explore.messages import JUDGE, PAIRS, SERVE, TRACE_BYTES, TRACES, CaseTurn, Sitting
from distcheck.records import Case, CaseReport, Outcome
from distcheck.worlds import blame
from distcheck.worlds.kept import Kept
from distcheck.worlds.launch import Ranks, error_of
from distcheck.worlds.pool import Pool
from distcheck.worlds.shares import Shared

_JUDGE_DEADLINE_S = 120.0


class KeptRanks:
    """Trains and judges one case after the other. Close it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._worlds: dict[int, Kept] = {}
        self._judge: Kept | None = None
        self._waiting: deque[Case] = deque()  # with the judge, in order
        self._traces = [os.memfd_create("distcheck-explored") for _ in range(2 * PAIRS)]

    def run(self, sittings: Iterable[Sitting]) -> Iterator[CaseReport]:
        """The cases' reports, in order. While one is judged the next is trained, so that by the
        time a failure is known its ranks have gone on; they are ended then.

        Raises what code under test raised for a person.
        """
        while self._waiting:  # from a caller that did not want the rest
            self._verdict()
        for number, sitting in enumerate(sittings):
            case, pair = sitting.case, number % PAIRS
            failed = self._record(case, pair)
            if not failed:
                judge = self._judge = self._judge or self._start_judge()
                judge.ask(msgspec.structs.replace(sitting, pair=pair))
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
        """What the judge says of the case that has waited longest."""
        assert self._judge is not None
        case = self._waiting.popleft()
        answer = self._judge.wait(_JUDGE_DEADLINE_S)
        if answer is None:
            error = error_of(self._judge.world.children[0])
            self._judge.close()
            self._judge = None
            self._waiting.clear()
            raise CannotRunError(f"the judge of {case.workload} failed: {error}")
        report = msgspec.msgpack.decode(answer, type=CaseReport)
        if report.verdict == "fail":
            self.forget(case.world)
        return report

    def _record(self, case: Case, pair: int) -> list[Outcome]:
        """How the ranks ended, if they did; nothing where all went well."""
        for fd in self._traces[2 * pair : 2 * pair + 2]:
            os.ftruncate(fd, 0)
            os.ftruncate(fd, TRACE_BYTES)
        failed = self._train(CaseTurn(case=case, pair=pair))
        if not failed and case.rerun:
            failed = self._train(CaseTurn(case=case, pair=pair, again=True))
        return failed

    def train(self, case: Case) -> None:
        """Trains a case and records nothing: what a world that is kept costs by itself."""
        self._train(CaseTurn(case=case, bare=True))

    def forget(self, world: int) -> None:
        """Ends the ranks of a world; the next case has new ones."""
        if world in self._worlds:
            self._worlds.pop(world).close()

    def close(self) -> None:
        """Ends everything."""
        for world in list(self._worlds):
            self.forget(world)
        if self._judge is not None:
            self._judge.close()
            self._judge = None
        while self._traces:
            os.close(self._traces.pop())

    def _train(self, turn: CaseTurn) -> list[Outcome]:
        """How the ranks ended, if they did; nothing where all went well."""
        case = turn.case
        if case.world not in self._worlds:
            self._worlds[case.world] = self._start_world(case)
        kept = self._worlds[case.world]
        kept.ask(turn)
        if kept.wait(case.deadline_s) is not None:
            return []
        children = kept.world.children
        refused = [c for c in children if c.raised and c.raised.exit_code == ExitCode.USAGE]
        error: DistcheckError | None = error_of(refused[0]) if refused else None
        outcomes = blame.outcomes(children, hung=kept.world.hung)
        self.forget(case.world)
        if error is not None:
            raise error
        return outcomes

    def _start_world(self, case: Case) -> Kept:
        fds = {name: Shared(fd=fd) for name, fd in zip(TRACES, self._traces, strict=True)}

        ranks = Ranks(
            job=SERVE,
            backend="gloo",
            size=case.world,
            request=lambda rendezvous: rendezvous,
            deadline_s=case.deadline_s,
        )
        return Kept.of_ranks(self._pool, ranks, fds)

    def _start_judge(self) -> Kept:
        fds = dict(zip(TRACES, self._traces, strict=True))
        return Kept.of_job(self._pool, JUDGE, b"", fds, _JUDGE_DEADLINE_S)
