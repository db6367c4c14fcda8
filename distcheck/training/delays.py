"""Delays one rank intentionally: it sleeps before backward, or before a collective.

Code without a required synchronization often passes by chance because peers are early enough;
delaying one rank exposes the race.

Collectives are counted at their Python entry points in `torch.distributed`. Collectives that DDP or
FSDP start from C++ are not counted; the sleep before backward delays them.
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


class RankDelays:
    """The delays of one rank, step by step. Call `install` before code under test is imported."""

    def __init__(self) -> None:
        self._ms: defaultdict[int, int] = defaultdict(int)
        self._entered = 0

    def install(self) -> None:
        """Make every collective of `torch.distributed` first apply the delays of the calling
        thread. Ranks of a simulated world are threads.
        """
        _of_thread[threading.get_ident()] = self
        if len(_of_thread) > 1:
            return  # another rank of this process has installed them
        for name in _COLLECTIVES:
            original = getattr(dist, name, None)
            if original is not None:
                late = _asking_first(original)
                setattr(dist, name, late)
                setattr(dist.distributed_c10d, name, late)

    def begin(self, delays: Sequence[Delay]) -> None:
        """Use these delays from now on. Several delays before one collective add up."""
        self._ms.clear()
        for delay in delays:
            self._ms[delay.collective] += delay.ms

    def watching(self, progress: Progress) -> Progress:
        """Return `progress`, extended to apply the delays at the start of phases."""

        def watched(step: int, phase: str) -> None:
            progress(step, phase)
            if phase == "forward":
                self._entered = 0
            elif phase == "backward":
                self._sleep(0)

        return watched

    def enter_collective(self) -> None:
        """Count a collective, and sleep if this rank is delayed for it."""
        if self._ms:
            self._entered += 1
            self._sleep(self._entered)

    def _sleep(self, collective: int) -> None:
        if ms := self._ms.get(collective, 0):
            time.sleep(ms / 1000)


_of_thread: dict[int, RankDelays] = {}


def _asking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        # A thread started by the code under test has the delays of its process's rank.
        first = next(iter(_of_thread.values()))
        _of_thread.get(threading.get_ident(), first).enter_collective()
        return original(*args, **kwargs)

    return collective
