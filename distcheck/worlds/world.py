"""One world of ranks: started together, watched, and ended together.

running     until every rank has reported, or one failed, or all stalled
asking      ranks that are still there are asked for their stacks
ending      whoever has not reported is killed
over        every rank is gone, and how each ended is known
"""

import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto

from distcheck.worlds import blame, messages
from distcheck.worlds.pool import Child, Pool
from distcheck.worlds.stalls import StallWatch

_GRACE_S = 0.7  # after a failure: for the peers to notice, and say so themselves
_ASK_S = 0.7  # for stacks to arrive
_LOOK_EVERY_S = 0.1


class Phase(Enum):
    """Where a world is in its life."""

    RUNNING = auto()
    ASKING = auto()
    ENDING = auto()
    OVER = auto()


class World:
    """The children that run one job together: the ranks of a world, or one lone reference."""

    def __init__(
        self,
        pool: Pool,
        *,
        target: str,
        payloads: list[bytes],
        fds: list[int],
        environments: list[dict[str, str]],
        deadline_s: float,
        on_progress: Callable[[int, messages.Progress], None] | None = None,
    ) -> None:
        self._pool = pool
        self._phase = Phase.RUNNING
        self._phase_since = time.monotonic()
        self._failed_at: float | None = None
        self._last_look = 0.0
        self.hung = False
        pool.wait_ready()  # before there are pipes: a helper forked from here would keep them open
        release_fd, self._release = os.pipe()
        dump_fd, self._dump = os.pipe()
        self.children: list[Child] = []
        self.begun = time.monotonic()
        try:
            for rank, (payload, env) in enumerate(zip(payloads, environments, strict=True)):
                child = pool.start(
                    target, payload, fds=fds, release_fd=release_fd, dump_fd=dump_fd, env=env
                )
                if on_progress is not None:
                    child.on_progress = _bound(on_progress, rank)
                self.children.append(child)
        finally:
            os.close(release_fd)
            os.close(dump_fd)
        self._watch = StallWatch(deadline_s, time.monotonic())

    @property
    def over(self) -> bool:
        """Whether every rank is gone."""
        return self._phase is Phase.OVER

    @property
    def succeeded(self) -> bool:
        """Whether every rank finished its job and left in peace."""
        return self.over and all(blame.finished(child) for child in self.children)

    @property
    def results(self) -> list[bytes]:
        """What each rank's job returned; only when all succeeded."""
        return [child.done.payload for child in self.children if child.done is not None]

    def tick(self) -> None:
        """Takes the next step, if it is time; call it after every pump."""
        now = time.monotonic()
        if self._phase is Phase.RUNNING:
            self._tick_running(now)
        elif self._phase is Phase.ASKING and now - self._phase_since >= _ASK_S:
            self._kill()
        if self._phase is Phase.ENDING and all(child.gone for child in self.children):
            self._enter(Phase.OVER, now)

    def kill(self) -> None:
        """Ends every rank at once, asking nothing."""
        if not self.over:
            self._kill()

    def begin_again(self, deadline_s: float) -> None:
        """Starts the clock anew, for ranks that were idle by intention."""
        self._watch = StallWatch(deadline_s, time.monotonic())

    def interrupt(self) -> None:
        """Ends the world as if it had hung now: ranks are asked for their stacks first."""
        if self._phase is Phase.RUNNING:
            self.hung = True
            self._ask(time.monotonic())

    def close(self) -> None:
        """Closes descriptors; the world is over, or was ended as far as it can be."""
        for child in self.children:
            self._pool.forget(child)
        for name in ("_release", "_dump"):
            self._close_pipe(name)

    def _tick_running(self, now: float) -> None:
        children = self.children
        if all(child.done is not None and not child.gone for child in children):
            self._release_all()
            self._enter(Phase.ENDING, now)
            return
        if any(child.raised is not None or child.gone for child in children):
            if self._failed_at is None:
                self._failed_at = now
            waiting = [c for c in children if not c.gone and c.raised is None and c.done is None]
            if not waiting or now - self._failed_at >= _GRACE_S:
                self._ask(now)
            return
        if now - self._last_look >= _LOOK_EVERY_S:
            self._last_look = now
            if self._watch.look([c for c in children if c.done is None], now):
                self.hung = True
                self._ask(now)

    def _ask(self, now: float) -> None:
        silent = [c for c in self.children if not c.gone and c.done is None and c.raised is None]
        self._close_pipe("_dump")
        if not silent:
            self._kill()
            return
        for child in silent:
            self._pool.signal(child, signal.SIGUSR1)
        self._enter(Phase.ASKING, now)

    def _kill(self) -> None:
        for child in self.children:
            if not child.gone and child.done is None and child.raised is None:
                self._pool.signal(child, signal.SIGKILL)
        self._release_all()
        self._enter(Phase.ENDING, time.monotonic())

    def _release_all(self) -> None:
        for child in self.children:
            child.released = not child.gone
        self._close_pipe("_release")

    def _enter(self, phase: Phase, now: float) -> None:
        self._phase, self._phase_since = phase, now

    def _close_pipe(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            os.close(fd)
            setattr(self, name, -1)


def _bound(
    on_progress: Callable[[int, messages.Progress], None], rank: int
) -> Callable[[messages.Progress], None]:
    return lambda progress: on_progress(rank, progress)
