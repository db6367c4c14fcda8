"""A forked process's line to the front."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from distcheck.worlds import messages
from distcheck.worlds.framing import frame, write_all

leave = os._exit  # which a child replaces by what tells of it


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Reporter:
    """A child's line to the front. Its methods may be called from any thread."""

    def __init__(self, events_fd: int) -> None:
        self._fd = events_fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.tell_stacks: Callable[[], None] | None = (
            None  # of a job that knows better what it does
        )

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        """Sends one event; a front that is gone is not a reason to fail. With `patience_s`, not if
        another is being sent for longer. A process that this one forked, and that has run on into
        what only this one may do, ends here.
        """
        if os.getpid() != self._pid:
            sys.stderr.write("distcheck: a fork of this rank ran on as if it were the rank\n")
            flush()
            leave(0)
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            write_all(self._fd, frame(event))
        except BrokenPipeError:
            leave(1)
        finally:
            self._lock.release()

    def progress(self, step: int, phase: str) -> None:
        """Says which phase of which step begins: the sign of life that deadlines watch."""
        self.send(messages.Progress(step, phase))

    def say(self, payload: bytes) -> None:
        """Tells the front something that only this job's starter understands."""
        self.send(messages.UserMessage(payload))
