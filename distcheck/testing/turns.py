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

import pytest

_LEAST_TURNS = 2  # one world alone leaves gaps while its ranks wait for each other
_LOOK_EVERY_S = 0.004

_held: list[socket.socket] = []


@contextmanager
def turn(config: pytest.Config) -> Iterator[None]:
    """Waits until this process may run a world. Without xdist there is nothing to wait for."""
    about = getattr(config, "workerinput", None)
    turns = max(_LEAST_TURNS, len(os.sched_getaffinity(0)))
    if about is None or about["workercount"] <= turns:
        yield
        return
    holder = _take(about["testrunuid"], turns)
    _held.append(holder)
    try:
        yield
    finally:
        _held.remove(holder)
        holder.close()


def _let_go_in_fork() -> None:
    """A name is taken as long as anybody has the socket open, and a kept world's helper, forked
    during a turn, lives on after it.
    """
    while _held:
        _held.pop().close()


os.register_at_fork(after_in_child=_let_go_in_fork)


def _take(run: str, turns: int) -> socket.socket:
    holder = socket.socket(socket.AF_UNIX)
    while True:
        for number in range(turns):
            try:
                holder.bind(f"\0distcheck-{run}-{number}")
            except OSError:
                continue
            return holder
        time.sleep(_LOOK_EVERY_S)
