"""A rank that is late on purpose: sleeps before backward, or before a collective.

Code that synchronizes without waiting is often right by luck: the others were there already. A rank
that comes late takes the luck away.

Collectives are counted where Python enters them, in `torch.distributed`'s functions, so those that
DDP or FSDP start from C++ are not: to make a rank late for these is what the sleep before backward
is for.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist

from distcheck.records import Delay

_COLLECTIVES = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier",
)  # fmt: skip
Progress = Callable[[int, str], None]


class Lateness:
    """The delays of one rank, step by step. `install` it before code under test is imported."""

    def __init__(self) -> None:
        self._ms: defaultdict[int, int] = defaultdict(int)
        self._entered = 0

    def install(self) -> None:
        """Makes every collective of `torch.distributed` ask first who is late in this thread: ranks
        of a simulated world are threads.
        """
        _of_thread[threading.get_ident()] = self
        if len(_of_thread) > 1:
            return  # another rank of this process has installed it
        for name in _COLLECTIVES:
            original = getattr(dist, name, None)
            if original is not None:
                late = _asking_first(original)
                setattr(dist, name, late)
                setattr(dist.distributed_c10d, name, late)

    def begin(self, delays: Sequence[Delay]) -> None:
        """From now on, these; several before one collective add up."""
        self._ms.clear()
        for delay in delays:
            self._ms[delay.collective] += delay.ms

    def watching(self, progress: Progress) -> Progress:
        """`progress`, and what it says of steps and phases is noted here."""

        def watched(step: int, phase: str) -> None:
            progress(step, phase)
            if phase == "forward":
                self._entered = 0
            elif phase == "backward":
                self._sleep(0)

        return watched

    def enter_collective(self) -> None:
        """Counts one, and sleeps where this rank is late for it."""
        if self._ms:
            self._entered += 1
            self._sleep(self._entered)

    def _sleep(self, collective: int) -> None:
        if ms := self._ms.get(collective, 0):
            time.sleep(ms / 1000)


_of_thread: dict[int, Lateness] = {}


def _asking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # A thread that the code under test has started is late as the rank of its process is.
        first = next(iter(_of_thread.values()))
        _of_thread.get(threading.get_ident(), first).enter_collective()
        return original(*args, **kwargs)

    return collective
