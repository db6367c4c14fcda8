"""How many worlds run at once when pytest-xdist runs many processes.

A world fills as many cores as it has ranks, so more worlds at a time than cores only makes each of
them slower. A process that wants to start one binds one of a few names in the abstract socket
namespace: the kernel gives a name to one process, and takes it back however that process ends.

A lock file (filelock) would need a folder that other users cannot write to, and a rank that is
forked during a turn would hold it as well.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distcheck.machine.resources import cores

_LEAST_TURNS = 2  # one world alone leaves gaps while its ranks wait for each other
_LOOK_EVERY_S = 0.004

_shared: tuple[str, int] | None = None  # a test run, and how many processes it has
_held: list[socket.socket] = []
_of_thread = threading.local()  # `inside` a turn


def share(run: str, *, processes: int) -> None:
    """From here on this process takes turns with the others of a test run."""
    global _shared
    _shared = (run, processes)


@contextmanager
def turn() -> Iterator[None]:
    """Waits until this process may run a world, where there are more processes than turns. Within
    a turn of its own a thread need not wait again.
    """
    holder = None if getattr(_of_thread, "inside", False) else _take()
    if holder is None:
        yield
        return
    _held.append(holder)
    _of_thread.inside = True
    try:
        yield
    finally:
        _of_thread.inside = False
        holder.close()
        if holder in _held:  # not in a fork, which has let go
            _held.remove(holder)


def _let_go_in_fork() -> None:
    """A name is taken as long as any process has the socket open, and a kept world's helper, forked
    during a turn, lives on after it. What a rank runs belongs to the turn of its test.
    """
    global _shared
    _shared = None
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):  # where there are no forks there are no worlds
    os.register_at_fork(after_in_child=_let_go_in_fork)


def _take() -> socket.socket | None:
    """Holds a turn by its name; None where waiting is not needed, or names cannot be had."""
    turns = max(_LEAST_TURNS, cores())
    if _shared is None or _shared[1] <= turns:
        return None
    holder = socket.socket(socket.AF_UNIX)
    while True:
        for number in range(turns):
            try:
                holder.bind(f"\0distcheck-{_shared[0]}-{number}")
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                holder.close()  # a sandbox may refuse it: rather too many worlds than none
                return None
            return holder
        time.sleep(_LOOK_EVERY_S)
