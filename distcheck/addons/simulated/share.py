"""Front-end handle of a simulated world, whose ranks all run in one process.

Each rank has its own child object, as if it were a process, so the code that supervises, ends and
judges a world needs no special case. An event of a rank is recorded in its child. When the process
ends, all ranks that had not ended before end with it.
"""

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from distcheck import backends
from distcheck.records.schedules import ScheduleSearchResult
from distcheck.worlds import messages
from distcheck.worlds.jobs import Asked, Descriptors, Job
from distcheck.worlds.launch import Ranks, job_result, rank_starts, run_until_over, start_job
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.forking import Forker, LocalShare
from distcheck.worlds.pool import Pool
from distcheck.worlds.shares import RankStart, Share

TURN, TURN_FD = struct.Struct("<I"), "turn"  # memory in which the process records the running rank
_TARGET = "distcheck.addons.simulated.host:run"
_LOOK_EVERY_S = 0.05
_NO_WORD = "the process of the simulated world exited while another rank ran"


class HostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to run `target` for each rank with its entry of `starts`. All ranks share the
    descriptors, except those whose names begin with `RANK/`, which belong to that rank.
    """

    target: str
    order: str
    deadline_s: float
    starts: list[RankStart]
    schedule: str = ""


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to run a world under several schedules: twice under the default schedule, and under
    the schedules with seeds 1 to `schedules`. With `preemptions`, it runs at most `schedules`
    schedules that have at most that many preemptions.
    """

    host: HostRequest
    schedules: int
    deadline_s: float
    preemptions: int = 0


SEARCH = Job(
    "distcheck.addons.simulated.search:run", SearchRequest, ScheduleSearchResult, ("data", "turn")
)


class ThreadRank(Child):
    """A rank that is a thread of the host process."""

    def __init__(self, rank: int, host: "HostProcess") -> None:
        super().__init__()
        self.rank, self._host = rank, host

    @property
    def starting(self) -> bool:
        """True if the host process is not forked yet."""
        return self._host.starting and not self.gone

    @property
    def busy_seconds(self) -> float:
        """Busy seconds of the host process, because exactly one rank runs at a time."""
        return self._host.busy_now

    @property
    def is_awake(self) -> bool:
        return self._host.awake_now

    @property
    def is_stopped(self) -> bool:
        return not self.gone and self._host.is_stopped

    @property
    def low_level_stacks(self) -> str:
        """faulthandler's output for the running thread. (faulthandler does not know ranks.)"""
        blocks = self._host.low_level_stacks.split("\n\n")
        return "\n\n".join(b for b in blocks if not b.startswith("Thread "))

    def take(self, event: messages.AnyEvent) -> None:
        """Record an event of this rank. A rank that raised has ended."""
        super().take(event)
        if isinstance(event, messages.Raised):
            super().take(messages.Exited(1))


class HostProcess(Child):
    """The process of a simulated world."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ranks = [ThreadRank(rank, self) for rank in range(size)]
        self._looked_at = 0.0
        self.busy_now, self.awake_now = 0.0, True
        self.turn_fd = os.memfd_create("distcheck-turn")
        os.truncate(self.turn_fd, TURN.size)

    @property
    def runs(self) -> int:
        return int(TURN.unpack(os.pread(self.turn_fd, TURN.size, 0))[0])

    def take(self, event: messages.AnyEvent) -> None:
        if isinstance(event, messages.RoutedEvent):
            if 0 <= event.key < len(self.ranks):
                self.ranks[event.key].take(event.event)
        elif isinstance(event, messages.Proven):
            for rank in self.ranks:
                rank.proven = event
        elif isinstance(event, messages.Remarked):
            self.ranks[0].remarks.append(event)
        elif isinstance(event, messages.Raised):
            for rank in self.ranks:
                if rank.done is None and rank.raised is None and not rank.gone:
                    rank.take(event)
        else:
            super().take(event)

    def take_output(self, data: bytes) -> None:
        """Add output of C code to the output of the running rank."""
        with contextlib.suppress(IndexError):
            self.ranks[self.runs].take_output(data)

    def look(self) -> None:
        """Read the state of the process from /proc, once for all ranks."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self.busy_now, self.awake_now = self.busy_seconds, self.is_awake

    def end_ranks(self) -> None:
        """Record that the process has ended, in all ranks that had not ended before."""
        ran = self.runs
        for rank in self.ranks:
            if rank.gone:
                continue
            rank.gone = True
            if rank.done is not None and rank.released:
                rank.exit_code = 0
                continue
            rank.exit_code, rank.exit_signal = self.exit_code, self.exit_signal
            rank.spawn_error = self.spawn_error
            died = self.exit_signal is None or not rank.cut_short
            if died and rank.rank != ran and not self.spawn_error:
                rank.cut_short, rank.exit_code, rank.exit_signal = True, None, signal.SIGKILL
                rank.stacks = rank.stacks or messages.Stacks(_NO_WORD, None, waits_for_turn=True)


class SimulatedShare(Share):
    """All ranks of a simulated world."""

    def __init__(
        self,
        forker: Forker,
        *,
        backend: str,
        deadline_s: float,
        target: str,
        starts: Sequence[RankStart],
        fds: Descriptors,
        schedule: str = "",
    ) -> None:
        self._host = HostProcess(len(starts))
        own_fds = {
            f"{rank}/{name}": fd for rank, s in enumerate(starts) for name, fd in s.fds.items()
        }
        request = HostRequest(
            target=target,
            order=backends.order_of(backend),
            deadline_s=deadline_s,
            starts=[replace(start, fds={}) for start in starts],
            schedule=schedule,
        )
        payload = msgspec.msgpack.encode(request)
        self._share = LocalShare(
            forker,
            target=_TARGET,
            starts={0: RankStart(payload=payload, environment={}, fds=own_fds)},
            fds={**fds, TURN_FD: self._host.turn_fd},
            new_child=lambda _: self._host,
        )
        self.children: dict[int, Child] = dict(enumerate(self._host.ranks))

    def look(self) -> None:
        self._host.look()
        if self._host.gone:
            self._host.end_ranks()

    def signal(self, child: Child, number: int) -> None:
        """Send a signal to the host process. Ranks cannot be ended individually."""
        self._share.signal(self._host, number)

    def ask(self) -> None:
        self._share.ask()

    def release(self) -> None:
        self._share.release()

    def close(self) -> None:
        self._share.close()
        if self._host.turn_fd >= 0:
            os.close(self._host.turn_fd)
            self._host.turn_fd = -1


def search_schedules(
    pool: Pool,
    ranks: Ranks[Asked],
    *,
    schedules: int,
    preemptions: int,
    fds: Descriptors | None = None,
    on_progress: Callable[[int], None] = lambda ran: None,
    look: Callable[[], None] = lambda: None,
) -> ScheduleSearchResult:
    """Run ranks in simulated worlds: under the default schedule, and under `schedules` others,
    which are random or have at most `preemptions` preemptions. Return the results. `look` is called
    regularly and may raise. Raises the errors of `job_result`.
    """
    host = HostRequest(
        target=ranks.job.target,
        order=backends.order_of(ranks.backend),
        deadline_s=ranks.deadline_s,
        starts=rank_starts(ranks, "127.0.0.1", 1),  # a simulated world has no store on a port
    )
    asked = SearchRequest(
        host=host, schedules=schedules, deadline_s=ranks.deadline_s, preemptions=preemptions
    )
    world = start_job(pool, SEARCH, asked, fds or {}, deadline_s=4 * ranks.deadline_s)
    world.children[0].on_progress = lambda progress: on_progress(progress.step)
    run_until_over(pool, world, look=look)
    try:
        return SEARCH.decode(job_result(world))
    finally:
        world.close()
