"""What a test leaves behind in a rank: process groups, unfinished collectives, threads."""

import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from distcheck.worlds import flight

_LOOKS = 500  # a thread that was told to end is given that long to do so
_LOOK_EVERY_S = 0.001
# Libraries of which a process keeps daemon threads that no test can end: a queue's feeder, a bar's
# monitor, those of a loader or a compiler.
_WITH_THREADS = ("multiprocessing", "torch", "tqdm")


class LeakWarning(UserWarning):
    """A test ended with something open. The rank ends, and with it the leak; in training it
    would have stayed.
    """


def threads_now() -> set[int]:
    """The threads that are here before the test."""
    return {thread.ident or 0 for thread in threading.enumerate()}


@dataclass(frozen=True)
class Left:
    """What is still open: a phrase for every kind, and whether a next test in the same ranks would
    meet it. A process group can be destroyed; what others have not entered, or what runs, cannot.
    """

    phrases: tuple[str, ...] = ()
    stays: bool = False


def left_behind(threads_before: set[int]) -> Left:
    """Looks for process groups, unfinished collectives, and threads that were not there before."""
    staying = _unfinished_work() or _results_never_asked_for()
    stray = _stray_threads(threads_before)
    if stray:
        staying.append(f"{_many(len(stray), 'thread')} running ({', '.join(sorted(stray))})")
    return Left((*_process_groups(), *staying), stays=bool(staying))


def _process_groups() -> list[str]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    extra = len(dist.distributed_c10d._world.pg_map) - 1
    return [f"{_many(extra, 'process group')} not destroyed"] if extra > 0 else []


def _unfinished_work() -> list[str]:
    open_calls = flight.still_open()
    if not open_calls:
        return []
    names = ", ".join(dict.fromkeys(open_calls))
    return [f"{_many(len(open_calls), 'collective')} not waited for ({names})"]


def _results_never_asked_for() -> list[str]:
    """Functional collectives, of which torch keeps the work until somebody waits for it."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    count = c10d._get_work_registry_size() if c10d is not None else 0
    return [f"{_many(count, 'functional collective')} not waited for"] if count else []


def _stray_threads(before: set[int]) -> list[str]:
    """Names of the threads that go on, once those that were told to end have had time to."""
    for _ in range(_LOOKS):
        stray = [
            thread.name
            for thread in threading.enumerate()
            if thread.ident not in before and not (thread.daemon and _is_of_a_library(thread))
        ]
        if not stray:
            break
        time.sleep(_LOOK_EVERY_S)
    return stray


def _is_of_a_library(thread: threading.Thread) -> bool:
    """Whether it was made by torch or C++, or by what a library has running once it was used."""
    if isinstance(thread, threading._DummyThread):
        return True
    runs = getattr(thread, "_target", None) or type(thread).run
    package, _, _ = str(getattr(runs, "__module__", "")).partition(".")
    return package in _WITH_THREADS


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
