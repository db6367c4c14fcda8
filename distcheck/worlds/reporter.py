"""The connection of a forked process to the front end."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable

from distcheck.worlds import messages
from distcheck.worlds.framing import frame, write_all

leave = os._exit  # a child replaces os._exit by a function that reports the exit


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


class Reporter:
    """A child's connection to the front end. Its methods may be called from any thread."""

    def __init__(self, events_fd: int) -> None:
        self._fd = events_fd
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.tell_stacks: Callable[[], None] | None = (
            None  # set by a job that collects its own stacks
        )

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        """Send one event; it is not an error if the front end has exited. With `patience_s`, give
        up if another send takes longer. A process that this one forked, and that reaches code
        meant for the rank only, exits here.
        """
        if os.getpid() != self._pid:
            sys.stderr.write(
                "distcheck: a forked child of this rank continued as if it were the rank\n"
            )
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
        """Report the start of a phase of a step: the heartbeat that deadlines watch."""
        self.send(messages.Progress(step, phase))

    def say(self, payload: bytes) -> None:
        """Send a payload that only the starter of this job understands."""
        self.send(messages.UserMessage(payload))
