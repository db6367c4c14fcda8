"""Persistent processes that serve one request after another, each over its own channel.

A request costs one message to each process and one message back. After a failure, the state of the
processes is unknown, so the caller ends them and starts new ones.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from distcheck.worlds.framing import Line
from distcheck.worlds.jobs import Asked, Descriptors, Job
from distcheck.worlds.launch import NO_FDS, Ranks, kill_worlds, start_job, start_world
from distcheck.worlds.pool import Pool
from distcheck.worlds.shares import Shared
from distcheck.worlds.world import World

CHANNEL = "channel"  # the descriptor on which a persistent process receives its requests


class WorkerPool:
    """Front-end handle of persistent processes. `start` starts a world of `size` ranks, with the
    given descriptors for each rank.
    """

    def __init__(
        self, pool: Pool, size: int, start: Callable[[Sequence[Descriptors]], World]
    ) -> None:
        self._pool = pool
        pairs = [socket.socketpair() for _ in range(size)]
        self._lines = [Line(ours, None) for ours, _ in pairs]
        try:
            self.world = start([{CHANNEL: theirs.fileno()} for _, theirs in pairs])
        except BaseException:
            self.hang_up()
            raise
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._said: list[deque[bytes]] = [deque() for _ in range(size)]
        for number, child in enumerate(self.world.children):
            child.on_said = self._said[number].append

    @classmethod
    def of_ranks(
        cls, pool: Pool, ranks: Ranks[Any], fds: Mapping[str, Shared] = NO_FDS
    ) -> "WorkerPool":
        return cls(pool, ranks.size, lambda own: start_world(pool, ranks, fds=fds, own_fds=own))

    @classmethod
    def of_job(
        cls, pool: Pool, job: Job[Asked, Any], request: Asked, fds: Descriptors, deadline_s: float
    ) -> "WorkerPool":
        """Start a single process outside any world."""
        return cls(
            pool,
            1,
            lambda own: start_job(pool, job, request, {**fds, **own[0]}, deadline_s=deadline_s),
        )

    def ask(self, request: msgspec.Struct) -> None:
        """Send a request to all processes. If one has exited, `wait` notices it."""
        for line in self._lines:
            try:
                line.send(request)
            except OSError:
                return

    def wait(self, deadline_s: float) -> bytes | None:
        """Return the first rank's answer once every rank has answered; None if the world ended
        before that. A caller that handles the messages of the children itself must not use this
        method.
        """
        self.world.begin_again(deadline_s)
        while not all(self._said):
            if self.world.over:
                return None
            self._pool.pump(0.05)
            self.world.tick()
        first, *_ = [said.popleft() for said in self._said]  # one from each
        return first

    def close(self) -> None:
        kill_worlds(self._pool, self.world)
        self.hang_up()

    def hang_up(self) -> None:
        for line in self._lines:
            line.close()


def requests(fds: Descriptors, kind: Any) -> Iterator[Any]:
    """Yield the front end's requests in a persistent process, until the channel is closed."""
    line = Line(socket.socket(fileno=fds[CHANNEL]), kind)
    with contextlib.suppress(EOFError):
        while True:
            yield line.next()[0]
