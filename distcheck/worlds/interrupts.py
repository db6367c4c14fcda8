"""Signal handling: Ctrl-C, SIGTERM, SIGHUP (a closed terminal) and SIGQUIT all end a command in the
same way, with a report on the results so far.

The first signal interrupts the command. While distcheck terminates the ranks and writes the report,
a second signal is ignored. A third one exits at once; a helper process then terminates the ranks.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from distcheck.errors import ExitCode

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LEAVES_AT = 3
_heard = 0


def handle_signals() -> None:
    """Make these signals interrupt this process from now on, except those that the parent ignored
    (nohup).
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _hear)


def ignore_signals() -> None:
    """Ignore these signals in a process that only has to exit with its own exit code."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer these signals in all threads. The first one is delivered after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    heard: list[int] = []
    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
    for first in heard[:1]:
        handler = handlers[signal.Signals(first)]
        assert callable(handler)
        handler(first, None)


def _hear(number: int, frame: FrameType | None) -> None:
    global _heard
    _heard += 1
    if _heard == 1:
        raise KeyboardInterrupt
    if _heard >= _LEAVES_AT:
        os._exit(ExitCode.INTERRUPTED)
