"""Distinguishes a hung world from a slow machine.

A fixed deadline is either too long to wait for, or too short on an overloaded machine (Measured:
the same passing world took 35 ms on an idle machine and 310 ms at load 20). The deadline therefore
limits time without progress in which no rank ran or waited for a core or a disk. A world that is
blocked in a collective accumulates this time in real time; a world that computes accumulates none.
For a rank that spins forever there is a separate deadline, ten times as long. A rank that sets up
an engine may compile extensions, so its deadline is longer.
"""

from collections.abc import Sequence

from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import SETTING_UP

# Share of the time between two looks, by any rank; gloo's and distcheck's threads use 0.4 %.
BUSY_SHARE = 0.02
BUSY_DEADLINES = 10.0  # deadlines for ranks that compute without progress
# Heuristic: a first use may compile extensions, in processes that are not observed here;
# DeepSpeed's took 30 s on two cores.
SETTING_UP_S = 600.0
_MOST_UNSEEN_S = 0.5  # looks are 0.1 s apart, reports of other machines 0.25 s


class TimeBetweenLooks:
    """Measures the time between consecutive looks at an object, excluding time in which this
    process did not run.
    """

    def __init__(self, now: float) -> None:
        self.last = now

    def since_last(self, now: float) -> float:
        """Return the seconds since the last look, at most half a second, and restart the
        measurement.
        """
        gap_s, self.last = now - self.last, now
        return min(gap_s, _MOST_UNSEEN_S)


class StallWatch:
    """Decides when a world has hung. Call `look` several times a second."""

    def __init__(self, deadline_s: float, now: float) -> None:
        self._deadline_s = deadline_s
        self._idle_s = 0.0
        self._busy_s = 0.0
        self._looks = TimeBetweenLooks(now)
        self._last_count = -1
        self._last_busy: dict[Child, float] = {}

    def look(self, children: Sequence[Child], now: float) -> bool:
        """Return True if the unfinished `children` have hung at `now` (monotonic seconds).

        No decision is possible while a child has sent no news since the last look: a rank on
        another machine would seem to have done nothing.
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
