"""Ctrl-C, SIGTERM, SIGHUP (a terminal that closes) and SIGQUIT: each ends a command in the same
way, with the report on what there is.

The first one interrupts. What then ends the ranks and writes the report hears the second one and
goes on; the third one leaves at once, and the helper ends the ranks when this process is gone.
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


def listen() -> None:
    """From now on these signals interrupt, unless the parent process had them ignored (nohup)."""
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _hear)


def ignore() -> None:
    """For a process that has nothing more to do than to leave with the code that it has."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Notes these signals, and hands the first one on afterwards. A mask would be this thread's
    alone.
    """
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
