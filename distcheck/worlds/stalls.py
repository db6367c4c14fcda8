"""Telling a hung world from a slow machine.

A fixed deadline is either too long to wait for or too short on a crowded machine (the same
passing world has been seen to take 35 ms on a quiet one and 310 ms at load 20). What counts here
is time without progress in which the ranks neither ran nor waited for a core or a disk: a world
that waits for a collective that will never complete gathers it at the pace of the clock, one that
computes gathers none. A rank that spins for ever is caught by a limit of its own, ten times as
long. A rank that sets up an engine may build extensions, so it has a longer deadline.
"""

from collections.abc import Sequence

from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import SETTING_UP

# Of the time between two looks, by any one rank; gloo's threads and ours run for 0.4 % of it.
BUSY_SHARE = 0.02
BUSY_DEADLINES = 10.0  # what works and never goes on may take that many deadlines
# Chosen: a first use may compile extensions, in processes that are not counted here; DeepSpeed's
# took 30 s of two cores.
SETTING_UP_S = 600.0
_MOST_UNSEEN_S = 0.5  # looks are 0.1 s apart, what other machines say 0.25 s


class Looks:
    """The time between looks at something, as far as this process was there to look."""

    def __init__(self, now: float) -> None:
        self.last = now

    def since_last(self, now: float) -> float:
        """Seconds since the last look, which is now another one; half a second at most."""
        gap_s, self.last = now - self.last, now
        return min(gap_s, _MOST_UNSEEN_S)


class StallWatch:
    """Decides when a world has hung. `look` at it a few times a second."""

    def __init__(self, deadline_s: float, now: float) -> None:
        self._deadline_s = deadline_s
        self._idle_s = 0.0
        self._busy_s = 0.0
        self._looks = Looks(now)
        self._last_count = -1
        self._last_busy: dict[Child, float] = {}

    def look(self, children: Sequence[Child], now: float) -> bool:
        """Whether the unfinished `children` have hung by `now` (monotonic seconds).

        Nothing is concluded while one has not been heard of since the last look: without news a
        rank on another machine would seem to have done nothing.
        """
        if any(child.known_at <= self._looks.last for child in children):
            return False
        elapsed = self._looks.since_last(now)
        count = sum(child.progress_count for child in children)
        before, self._last_busy = self._last_busy, {c: c.busy_seconds for c in children}
        worked = max(busy - before.get(child, 0.0) for child, busy in self._last_busy.items())
        if count != self._last_count:
            self._last_count, self._idle_s, self._busy_s = count, 0.0, 0.0
            return False
        if (
            any(child.starting for child in children)
            or worked > BUSY_SHARE * elapsed
            or any(child.is_awake for child in children)
        ):
            self._busy_s += elapsed
        else:
            self._idle_s += elapsed
        sets_up = any(c.progress is not None and c.progress.phase == SETTING_UP for c in children)
        allowed_s = max(self._deadline_s, SETTING_UP_S) if sets_up else self._deadline_s
        return self._idle_s >= allowed_s or self._busy_s >= BUSY_DEADLINES * allowed_s
