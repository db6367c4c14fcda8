"""What a test leaves behind in a rank: process groups, unfinished collectives, threads."""

import sys
import threading
import time
from typing import Any

from distcheck.worlds import flight

_LOOKS = 100
_LOOK_EVERY_S = 0.001


class LeakWarning(UserWarning):
    """A test ended with something open. The rank ends, and with it the leak; in training it
    would have stayed.
    """


def threads_now() -> set[int]:
    """The threads that are here before the test."""
    return {thread.ident or 0 for thread in threading.enumerate()}


def left_behind(threads_before: set[int]) -> list[str]:
    """One phrase for every kind of thing that is still open."""
    found = [*_process_groups(), *_unfinished_work()]
    stray = [
        thread.name
        for thread in threading.enumerate()
        if thread.ident not in threads_before and not thread.daemon
    ]
    if stray:
        found.append(f"{_many(len(stray), 'thread')} running ({', '.join(sorted(stray))})")
    return found


def _process_groups() -> list[str]:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return []
    extra = len(dist.distributed_c10d._world.pg_map) - 1
    return [f"{_many(extra, 'process group')} not destroyed"] if extra > 0 else []


def _unfinished_work() -> list[str]:
    for _ in range(_LOOKS):  # a call that has returned is entered as complete a moment later
        open_calls = [flight.name_of(e) for e in flight.entries(stacks=False) if flight.is_open(e)]
        if not open_calls:
            break
        time.sleep(_LOOK_EVERY_S)
    if not open_calls:
        return []
    names = ", ".join(dict.fromkeys(open_calls))
    return [f"{_many(len(open_calls), 'collective')} not waited for ({names})"]


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"
