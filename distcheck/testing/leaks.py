"""Resources that a test leaves open in a rank: process groups, collectives, threads, processes."""

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

_LOOKS = 500  # time for a thread to end after it was asked to
_LOOK_EVERY_S = 0.001
# Folders of Python and installed packages: their daemon threads, which no test can end, are
# ignored, such as a queue's feeder, a progress bar's monitor, an event loop, a loader or a
# compiler.
_INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
# In the command lines of processes that libraries start once and keep.
_KEPT_BY = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_FOLDERS = {"site-packages", "dist-packages"}


class LeakWarning(UserWarning):
    """A test left resources open. They end with the rank, but training would leak them."""


@dataclass(frozen=True)
class OpenResources:
    """State before the test: threads, child processes, and functional collectives."""

    threads: frozenset[int]
    processes: frozenset[int]
    functional: int


def open_resources_now() -> OpenResources:
    """Return the current open resources, which `leaks_since` does not attribute to the test."""
    threads = frozenset(thread.ident or 0 for thread in threading.enumerate())
    return OpenResources(
        threads=threads,
        processes=frozenset(linux.children_of_self()),
        functional=_functional_collectives(),
    )


@dataclass(frozen=True)
class LeakedResources:
    """Open resources, with a phrase for every kind. `stays` is True if one would affect a later
    test in the same ranks, as an incomplete collective or a running thread; a process group can be
    destroyed.
    """

    phrases: tuple[str, ...] = ()
    stays: bool = False


def find_leaks(before: OpenResources, *, has_process: bool = True) -> LeakedResources:
    """Find process groups, unfinished collectives, and new threads and processes.

    `has_process` is False for a rank that is a thread. It has no process for itself, so resources
    of the process may belong to a different rank, and the simulated world reports unfinished calls
    itself.
    """
    if not has_process:
        return LeakedResources(tuple(_process_groups()))
    staying = _unfinished_work() or _unwaited_collectives(before.functional)
    stray = _stray_threads(before.threads)
    if stray:
        staying.append(
            f"{_format_count(len(stray), 'thread')} running ({', '.join(sorted(stray))})"
        )
    running = _stray_processes(before.processes)
    if running:
        names = ", ".join(sorted(running))
        staying.append(f"{_format_count(len(running), 'process')} running ({names})")
    return LeakedResources((*_process_groups(), *staying), stays=bool(staying))


def _process_groups() -> list[str]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    from distcheck.machine import compat  # imports torch, which a test may do without

    extra = len(compat.groups()) - 1
    return [f"{_format_count(extra, 'process group')} not destroyed"] if extra > 0 else []


def _unfinished_work() -> list[str]:
    open_calls = flight.incomplete_collectives()
    if not open_calls:
        return []
    names = ", ".join(dict.fromkeys(open_calls))
    return [f"{_format_count(len(open_calls), 'collective')} not waited for ({names})"]


def _unwaited_collectives(before: int) -> list[str]:
    count = _functional_collectives() - before
    return [f"{_format_count(count, 'functional collective')} not waited for"] if count > 0 else []


def _functional_collectives() -> int:
    if "torch.distributed" not in sys.modules:
        return 0
    from distcheck.machine import compat  # imports torch, which a test may do without

    return compat.functional_collectives()


def _stray_threads(before: frozenset[int]) -> list[str]:
    """Return the names of running threads, after time for ending ones to finish."""
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
    """Return the names of running processes, after time for ending ones to finish; zombies and
    processes kept by libraries are ignored.
    """
    for _ in range(_LOOKS):
        stray = [linux.process_name(pid) for pid in linux.children_of_self() if pid not in before]
        stray = [name for name in stray if name and not any(part in name for part in _KEPT_BY)]
        if not stray:
            break
        time.sleep(_LOOK_EVERY_S)
    return [name.split("/")[-1][:40] for name in stray]


def _is_of_a_library(thread: threading.Thread) -> bool:
    """Return True if it was created by C++, or runs code of Python, torch or a package."""
    if isinstance(thread, threading._DummyThread):
        return True
    # The function of a Timer is its `function`.
    runs: Any = getattr(thread, "_target", None) or getattr(thread, "function", type(thread).run)
    while isinstance(runs, functools.partial):
        runs = runs.func
    with contextlib.suppress(ValueError):  # of a proxy, which has every attribute
        runs = inspect.unwrap(runs)
    code = getattr(runs, "__code__", None) or getattr(type(runs).__call__, "__code__", None)
    if code is None:  # a builtin, such as time.sleep
        return True
    package, _, _ = str(getattr(runs, "__module__", "")).partition(".")
    path = code.co_filename
    installed = path.startswith(_INSTALLED) or not _FOLDERS.isdisjoint(path.split(os.sep))
    return installed or package == "torch"  # also if torch was built in its own source folder


def _format_count(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count} {what}{plural if count > 1 else ''}"
