"""What a test leaves behind in a rank: process groups, collectives, threads, processes."""

import contextlib
import functools
import inspect
import os
import sys
import sysconfig
import threading
import time
from dataclasses import dataclass
from typing import Any

from distcheck.worlds import flight, linux

_LOOKS = 500  # a thread that was asked to end is given that long to do so
_LOOK_EVERY_S = 0.001
# Where Python and what is installed lie: a process keeps daemon threads of theirs that no test can
# end, as a queue's feeder, a bar's monitor, an event loop, those of a loader or a compiler.
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
# In the command lines of processes that libraries start once and keep.
_KEPT_BY = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_FOLDERS = {"site-packages", "dist-packages"}


class LeakWarning(UserWarning):
    """A test ended with something open. The rank ends, and with it the leak; in training it
    would have stayed.
    """


@dataclass(frozen=True)
class Before:
    """What is here before the test: threads, processes that this one has started, and functional
    collectives of the pytest process.
    """

    threads: frozenset[int]
    processes: frozenset[int]
    functional: int


def here_now() -> Before:
    """What the test will not have left."""
    threads = frozenset(thread.ident or 0 for thread in threading.enumerate())
    return Before(
        threads=threads,
        processes=frozenset(linux.children_of_self()),
        functional=_functional_collectives(),
    )


@dataclass(frozen=True)
class StillOpen:
    """What is still open: a phrase for every kind, and whether a next test in the same ranks would
    meet it. A process group can be destroyed; what others have not entered, or what runs, cannot.
    """

    phrases: tuple[str, ...] = ()
    stays: bool = False


def left_behind(before: Before, *, has_process: bool = True) -> StillOpen:
    """Looks for process groups, unfinished collectives, and threads and processes that were not
    there before. A rank that is a thread has no process: what its process has may be another
    rank's, and a simulated world names unfinished calls itself.
    """
    if not has_process:
        return StillOpen(tuple(_process_groups()))
    staying = _unfinished_work() or _results_never_asked_for(before.functional)
    stray = _stray_threads(before.threads)
    if stray:
        staying.append(f"{_many(len(stray), 'thread')} running ({', '.join(sorted(stray))})")
    running = _stray_processes(before.processes)
    if running:
        names = ", ".join(sorted(running))
        staying.append(f"{_many(len(running), 'process')} running ({names})")
    return StillOpen((*_process_groups(), *staying), stays=bool(staying))


def _process_groups() -> list[str]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    from distcheck.machine import compat  # imports torch, which a test may do without

    extra = len(compat.groups()) - 1
    return [f"{_many(extra, 'process group')} not destroyed"] if extra > 0 else []


def _unfinished_work() -> list[str]:
    open_calls = flight.still_open()
    if not open_calls:
        return []
    names = ", ".join(dict.fromkeys(open_calls))
    return [f"{_many(len(open_calls), 'collective')} not waited for ({names})"]


def _results_never_asked_for(before: int) -> list[str]:
    count = _functional_collectives() - before
    return [f"{_many(count, 'functional collective')} not waited for"] if count > 0 else []


def _functional_collectives() -> int:
    """Those of which torch keeps the work until it is waited for."""
    if "torch.distributed" not in sys.modules:
        return 0
    from distcheck.machine import compat  # imports torch, which a test may do without

    return compat.functional_collectives()


def _stray_threads(before: frozenset[int]) -> list[str]:
    """Names of the threads that go on, once those that were asked to end have had time to."""
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


def _stray_processes(before: frozenset[int]) -> list[str]:
    """Names of the processes that go on, once those that are ending have had time to; those
    that libraries keep, and zombies, do not count.
    """
    for _ in range(_LOOKS):
        stray = [linux.name_of(pid) for pid in linux.children_of_self() if pid not in before]
        stray = [name for name in stray if name and not any(part in name for part in _KEPT_BY)]
        if not stray:
            break
        time.sleep(_LOOK_EVERY_S)
    return [name.split("/")[-1][:40] for name in stray]


def _is_of_a_library(thread: threading.Thread) -> bool:
    """Whether it was made by C++, or runs code of Python's, of torch's or of what is installed."""
    if isinstance(thread, threading._DummyThread):
        return True
    # A Timer calls its `function`.
    runs: Any = getattr(thread, "_target", None) or getattr(thread, "function", type(thread).run)
    while isinstance(runs, functools.partial):
        runs = runs.func
    with contextlib.suppress(ValueError):  # of a proxy, which has every attribute
        runs = inspect.unwrap(runs)
    code = getattr(runs, "__code__", None) or getattr(type(runs).__call__, "__code__", None)
    if code is None:  # built in, as time.sleep
        return True
    package, _, _ = str(getattr(runs, "__module__", "")).partition(".")
    path = code.co_filename
    installed = path.startswith(_INSTALLED) or not _FOLDERS.isdisjoint(path.split(os.sep))
    return installed or package == "torch"  # also where it is built in its own source


def _many(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural if count > 1 else ''}"
