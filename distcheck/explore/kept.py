"""The front's side of kept ranks: a world of each size, one judge, one pair of traces.

A case costs a message to each rank and one to the judge, who is at work while the ranks train the
next. After any failure the ranks that met it
are thrown away: their state is not trusted.
"""

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from distcheck.errors import CannotRunError, DistcheckError, ExitCode
from distcheck.explore.messages import PAIRS, TRACE_BYTES, Sitting, Turn
from distcheck.records import Case, CaseReport, Outcome
from distcheck.worlds import blame, messages
from distcheck.worlds.launch import end_now, error_of, start_job, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.shares import Shared
from distcheck.worlds.world import World

_RANK = "distcheck.explore.kept_rank:serve"
_JUDGE = "distcheck.explore.kept_rank:judge"
_JUDGE_DEADLINE_S = 120.0


class _Band:
    """Processes that stay, a channel to each, and what they have said since the last message."""

    def __init__(self, pool: Pool, start: Callable[[list[int]], World], size: int) -> None:
        self._pool = pool
        pairs = [socket.socketpair() for _ in range(size)]
        self._channels = [ours for ours, _ in pairs]
        try:
            self.world = start([theirs.fileno() for _, theirs in pairs])
        except BaseException:
            self._close_channels()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._said: list[deque[bytes]] = [deque() for _ in range(size)]
        for number, child in enumerate(self.world.children):
            child.on_said = self._said[number].append

    def tell(self, message: msgspec.Struct) -> None:
        """Sends one message to everybody; one that is gone will be noticed."""
        data = messages.frame(message)
        for channel in self._channels:
            try:
                channel.sendall(data)
            except OSError:
                return

    def wait(self, deadline_s: float) -> bytes | None:
        """What the first one says, when everybody has said something; None if that comes never,
        and the band is over.
        """
        self.world.begin_again(deadline_s)
        while not all(self._said):
            if self.world.over:
                return None
            self._pool.pump(0.05)
            self.world.tick()
        first, *_ = [said.popleft() for said in self._said]  # all of them
        return first

    def close(self) -> None:
        """Ends everybody."""
        end_now(self._pool, self.world)
        self._close_channels()

    def _close_channels(self) -> None:
        for channel in self._channels:
            channel.close()


class KeptRanks:
    """Trains and judges one case after the other. Close it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._worlds: dict[int, _Band] = {}
        self._judge: _Band | None = None
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
                judge.tell(msgspec.structs.replace(sitting, pair=pair))
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
        failed = self._train(Turn(case=case, pair=pair))
        if not failed and case.rerun:
            failed = self._train(Turn(case=case, pair=pair, again=True))
        return failed

    def train(self, case: Case) -> None:
        """Trains a case and records nothing: what a world that is kept costs by itself."""
        self._train(Turn(case=case, bare=True))

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

    def _train(self, turn: Turn) -> list[Outcome]:
        """How the ranks ended, if they did; nothing where all went well."""
        case = turn.case
        if case.world not in self._worlds:
            self._worlds[case.world] = self._start_world(case)
        band = self._worlds[case.world]
        band.tell(turn)
        if band.wait(case.deadline_s) is not None:
            return []
        children = band.world.children
        refused = [c for c in children if c.raised and c.raised.exit_code == ExitCode.USAGE]
        error: DistcheckError | None = error_of(refused[0]) if refused else None
        outcomes = blame.outcomes(children, hung=band.world.hung)
        self.forget(case.world)
        if error is not None:
            raise error
        return outcomes

    def _start_world(self, case: Case) -> _Band:
        def start(channels: list[int]) -> World:
            return start_world(
                self._pool,
                target=_RANK,
                backend="gloo",
                size=case.world,
                payload=msgspec.msgpack.encode,
                fds=[Shared(fd=fd) for fd in (*self._traces, *channels)],
                deadline_s=case.deadline_s,
            )

        return _Band(self._pool, start, case.world)

    def _start_judge(self) -> _Band:
        def start(channels: list[int]) -> World:
            fds = [*self._traces, *channels]
            deadline_s = _JUDGE_DEADLINE_S
            return start_job(self._pool, target=_JUDGE, payload=b"", fds=fds, deadline_s=deadline_s)

        return _Band(self._pool, start, 1)
