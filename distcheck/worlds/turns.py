"""Limits the number of concurrent worlds when pytest-xdist runs several test processes.

A world occupies as many cores as it has ranks, so more concurrent worlds than cores only slow each
other down. A process that wants to start a world binds one of a few names in the abstract socket
namespace. The kernel gives a name to only one process, and releases it however that process ends.

A lock file (filelock) would need a folder that other users cannot write to, and a rank that was
forked during a turn would hold the lock as well.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distcheck.machine.resources import cores

_LEAST_TURNS = 2  # a single world leaves cores idle while its ranks wait for each other
_LOOK_EVERY_S = 0.004
_PATIENCE_S = 600.0  # Chosen: longer than a world lasts; another user can bind the names as well

_shared: tuple[str, int] | None = None  # name of a test run, and number of its processes
_held: list[socket.socket] = []
_of_thread = threading.local()  # `inside` a turn


def take_turns(run: str, *, processes: int) -> None:
    """Make this process take turns with the other processes of a test run from now on."""
    global _shared
    _shared = (run, processes)


@contextmanager
def wait_for_turn() -> Iterator[None]:
    """Wait until this process may run a world, if there are more processes than turns. A thread
    that holds a turn does not wait again.
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
        if holder in _held:  # False in a fork, which has released it
            _held.remove(holder)


def _let_go_in_fork() -> None:
    """Release the turn in a forked process. Otherwise the name would stay bound as long as any fork
    has the socket open: the helper of a persistent world, forked during a turn, outlives that turn.
    Worlds that a rank starts belong to the turn of its test.
    """
    global _shared
    _shared = None
    while _held:
        _held.pop().close()


if hasattr(os, "register_at_fork"):  # without forks there are no worlds
    os.register_at_fork(after_in_child=_let_go_in_fork)


def _take() -> socket.socket | None:
    """Acquire a turn by binding its name. Return None if a turn is not needed or not possible, or
    if no turn is released in time; this process then takes no more turns.
    """
    global _shared
    turns = max(_LEAST_TURNS, cores())
    if _shared is None or _shared[1] <= turns:
        return None
    holder = socket.socket(socket.AF_UNIX)
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
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
    holder.close()
    _shared = None
    return None
