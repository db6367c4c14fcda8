"""How many worlds run at once when pytest-xdist runs many processes.

A world fills as many cores as it has ranks, so more worlds at a time than cores only makes each of
them slower. A process that wants to start one binds one of a few names in the abstract socket
namespace: the kernel gives a name to one process, and takes it back however that process ends. No
file, no lock that outlives anybody.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from distcheck.cores import cores

_LEAST_TURNS = 2  # one world alone leaves gaps while its ranks wait for each other
_LOOK_EVERY_S = 0.004

_names: list[str] = []  # of the turns of this test run; none where nobody has to wait
_held: list[socket.socket] = []


def share(run: str, *, processes: int) -> None:
    """From here on this process takes turns with the others of a test run."""
    turns = max(_LEAST_TURNS, cores())
    _names[:] = [f"\0distcheck-{run}-{n}" for n in range(turns)] if processes > turns else []


@contextmanager
def turn() -> Iterator[None]:
    """Waits until this process may run a world, where there are more processes than turns. Within
    a turn of its own it need not wait again.
    """
    if not _names or _held:
        yield
        return
    holder = _take()
    _held.append(holder)
    try:
        yield
    finally:
        _held.remove(holder)
        holder.close()


def _let_go_in_fork() -> None:
    """A name is taken as long as anybody has the socket open, and a kept world's helper, forked
    during a turn, lives on after it. What a rank runs belongs to the turn of its test.
    """
    _names.clear()
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_let_go_in_fork)


def _take() -> socket.socket:
    holder = socket.socket(socket.AF_UNIX)
    while True:
        for name in _names:
            try:
                holder.bind(name)
            except OSError:
                continue
            return holder
        time.sleep(_LOOK_EVERY_S)
