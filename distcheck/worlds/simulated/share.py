"""The ranks of a simulated world, as the front sees them: one process stands for all.

Each rank has a child of its own, as ranks that are processes have, so that what watches, ends and
judges a world needs to know nothing of it. What the process says of a rank is noted in the rank's
child; how the process ends is how every rank ends that had not ended before.
"""

import contextlib
import os
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from distcheck import backends
from distcheck.records.schedules import Searched
from distcheck.worlds import messages
from distcheck.worlds.jobs import Descriptors, Job
from distcheck.worlds.local.children import Child
from distcheck.worlds.local.forking import Forker, LocalShare
from distcheck.worlds.shares import RankStart, Share

TURN, TURN_FD = struct.Struct("<I"), "turn"  # where the process notes which rank runs
_TARGET = "distcheck.worlds.simulated.host:run"
_LOOK_EVERY_S = 0.05
_NO_WORD = "the process of the simulated world ended while another rank ran"


class HostRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run `target` for each rank, started as one of `starts` says.

    Descriptors are every rank's, or, where their name begins with `RANK/`, that rank's alone.
    """

    target: str
    order: str
    deadline_s: float
    starts: list[RankStart]
    schedule: str = ""


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Run a world under the usual schedule twice, and under those of seeds 1 to `schedules`; or,
    with `preemptions`, under those with at most so many switches, at most `schedules` of them.
    """

    host: HostRequest
    schedules: int
    deadline_s: float
    preemptions: int = 0


SEARCH = Job("distcheck.worlds.simulated.search:run", SearchRequest, Searched, ("data", "turn"))


class RankOfHost(Child):
    """A rank that is a thread of a process."""

    def __init__(self, rank: int, host: "HostProcess") -> None:
        super().__init__()
        self.rank, self._host = rank, host

    @property
    def starting(self) -> bool:
        """Whether its process is still to be forked."""
        return self._host.starting and not self.gone

    @property
    def busy_seconds(self) -> float:
        """Its process's: exactly one rank runs at a time."""
        return self._host.busy_now

    @property
    def is_awake(self) -> bool:
        return self._host.awake_now

    @property
    def is_stopped(self) -> bool:
        return not self.gone and self._host.is_stopped

    @property
    def low_level_stacks(self) -> str:
        """What faulthandler wrote of the thread that ran; it does not know of ranks."""
        blocks = self._host.low_level_stacks.split("\n\n")
        return "\n\n".join(b for b in blocks if not b.startswith("Thread "))

    def take(self, event: messages.AnyEvent) -> None:
        """Notes an event; a thread that raised is gone."""
        super().take(event)
        if isinstance(event, messages.Raised):
            super().take(messages.Exited(1))


class HostProcess(Child):
    """The process itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ranks = [RankOfHost(rank, self) for rank in range(size)]
        self._looked_at = 0.0
        self.busy_now, self.awake_now = 0.0, True
        self.turn_fd = os.memfd_create("distcheck-turn")
        os.truncate(self.turn_fd, TURN.size)

    @property
    def runs(self) -> int:
        return int(TURN.unpack(os.pread(self.turn_fd, TURN.size, 0))[0])

    def take(self, event: messages.AnyEvent) -> None:
        """Notes an event, or hands it to the rank that it is of."""
        if isinstance(event, messages.Of):
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
        """What C code printed, taken as of the rank that runs."""
        with contextlib.suppress(IndexError):
            self.ranks[self.runs].take_output(data)

    def look(self) -> None:
        """Refreshes what is read from /proc, for all ranks at once."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self.busy_now, self.awake_now = self.busy_seconds, self.is_awake

    def end_ranks(self) -> None:
        """Notes that the process is gone, in the ranks that had not ended."""
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
        """Takes note of how the process is."""
        self._host.look()
        if self._host.gone:
            self._host.end_ranks()

    def signal(self, child: Child, number: int) -> None:
        """Sends a signal to the process: it can only end as a whole."""
        self._share.signal(self._host, number)

    def ask(self) -> None:
        """Makes every rank tell what it is doing."""
        self._share.ask()

    def release(self) -> None:
        """Lets the process leave."""
        self._share.release()

    def close(self) -> None:
        self._share.close()
        if self._host.turn_fd >= 0:
            os.close(self._host.turn_fd)
            self._host.turn_fd = -1
