"""Noticing a helper that is there and does not answer: one that was stopped."""

import time
from typing import NoReturn

from distcheck.errors import HelperError
from distcheck.worlds import linux
from distcheck.worlds.local.helper_process import HelperProcess
from distcheck.worlds.stalls import Looks

_STOPPED_S = 30.0  # for which it may be stopped; chosen as for a rank
_LOOK_EVERY_S = 0.2


class HelperWatch:
    """Looks at a helper a few times a second."""

    def __init__(self, helper: HelperProcess) -> None:
        self._helper = helper
        self._looks, self._stopped_s = Looks(time.monotonic()), 0.0

    def look(self) -> None:
        """Raises HelperError for a helper that is stopped: it would answer nothing, for ever."""
        now = time.monotonic()
        if now - self._looks.last < _LOOK_EVERY_S:
            return
        elapsed = self._looks.since_last(now)
        pid = self._helper.pid
        self._stopped_s = self._stopped_s + elapsed if pid and linux.is_stopped(pid) else 0.0
        if self._stopped_s >= _STOPPED_S:
            self.give_up(f"it was stopped (process {pid}, state T), as SIGSTOP does")

    def end(self, patience_s: float) -> None:
        """Waits until the helper is gone; kills it when patience runs out, or where it is stopped
        and can do nothing about its end.
        """
        stopped = self._helper.pid and linux.is_stopped(self._helper.pid)
        self._helper.end(0.0 if stopped else patience_s)

    def give_up(self, how: str) -> NoReturn:
        """Ends the helper, which can be killed even where it is stopped. Raises HelperError."""
        self._helper.end(0.0)
        raise HelperError(f"the process that forks the ranks does not answer: {how}; run it again")
