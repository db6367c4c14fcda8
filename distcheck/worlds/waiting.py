"""Detects, within a rank, that the rank is blocked in a call that only other ranks can complete.

A thread polls ten times a second. The main thread is blocked in either of two cases: it is within
`Work.wait` at two consecutive polls; or it is within C++ code of torch that waits for collectives
(such as backward with DDP), has not run since the last poll, and has incomplete collectives. In the
second case it is unknown which call it waits for. The thread reports the awaited calls once, and
retracts the report when the rank resumes.
"""

import contextlib
import dataclasses
import math
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from distcheck.records import posted_calls
from distcheck.records.posted_calls import PostedCall
from distcheck.worlds import flight, linux, messages
from distcheck.worlds.call_recorder import HERE, NotedCall, PostedCalls
from distcheck.worlds.jobs import Reporter

LOOK_EVERY_S = 0.1
# The recorder's names that are also the kind of the call.
_KINDS = ("all_reduce", "broadcast", "all_gather", "barrier")
_OF_GLOO = {"reduce_scatter": "all_reduce", "all_reduce_coalesced": "all_reduce"}


class RankInspector:
    """Polls the state of this rank, and sends reports to the front end."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter, self._postings = reporter, HERE
        self._last: Any = None
        self._reported: Any = None
        self._telling = threading.Lock()
        self.over = False
        self._main = threading.main_thread().ident or 0
        HERE.after_wait = self._take_back

    def again(self) -> None:
        """Poll once. A state that is seen twice is reported. In another release of torch, the
        polled structures may differ or change concurrently; then nothing is reported, and the
        deadline applies.
        """
        with contextlib.suppress(Exception):
            self._poll()

    def _poll(self) -> None:
        on = self._postings.on
        seen: Any = "over" if self.over else on if on is not None else self._in_torch()
        same = seen is not None and (seen is self._last if on is not None else seen == self._last)
        self._last = seen
        if self._reported is not None and seen is not self._reported and seen != self._reported:
            with self._telling:
                self._go_on()
        if same and self._reported is None:
            with self._telling:
                if self._postings.on is on:
                    self._tell(seen, on)

    def _tell(self, seen: Any, on: list[NotedCall] | None) -> None:
        said = self._said(on)
        if said is not None:
            if isinstance(seen, tuple):
                said.ran_ns = seen[-1]
            self._reported = seen
            self._reporter.send(said)

    def _take_back(self, on: Any) -> None:
        """Retract the report of a wait that has ended, if the wait was reported."""
        if self._reported is on or self._telling.locked():
            with self._telling:
                if self._reported is on:
                    self._go_on()

    def _go_on(self) -> None:
        if self._reported is not None:
            self._reported = None
            self._reporter.send(messages.Unblocked())

    def _in_torch(self) -> Any:
        """Return the position of the main thread in C++ code that may wait, and the thread's run
        time; else None.
        """
        from distcheck.machine import compat  # imports torch, which the front end must not

        frame = sys._current_frames().get(self._main)
        if frame is None:
            return None
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not any(file.endswith(end) and own in ("", name) for end, own in compat.MAY_WAIT):
            return None
        ran_ns = linux.main_thread_run_ns(os.getpid())
        return (id(frame), frame.f_lasti, ran_ns) if ran_ns else None

    def _said(self, on: list[NotedCall] | None) -> messages.Blocked | None:
        """Return the report; None if too little is known to be used in a proof."""
        groups = _groups()
        if groups is None or self._postings.misses_messages:
            return None
        entries = [entry for entry in flight.entries() if not _is_noted_message(entry)]
        posted = {name: n - self._postings.of_group[name] for name, (n, _) in groups.items()}
        calls = [_as_posted(entry, self._postings) for entry in entries]
        if any(c.number > posted.get(c.group, math.inf) for c in calls):
            return None  # there are messages unknown to this process
        found: list[int] = []
        if not self.over:
            still = [place for place, entry in enumerate(entries) if flight.is_incomplete(entry)]
            found = still if on is None else _places_of(on[0], entries, calls)
            if not found:
                return None
        limits = _limits_s()
        usual_s = self._postings.usual_limit_s
        if any(limits.get(calls[place].group, math.inf) < usual_s for place in found):
            return None  # the code may continue after its timeout
        return messages.Blocked(
            on=tuple(found),
            over=self.over,
            alone=_is_alone(self._main),
            calls=calls,
            posted=posted,
            ranks={name: ranks for name, (_, ranks) in groups.items()},
            messages=[(*key, count) for key, count in list(self._postings.messages.items())],
            received=[(g, tag, n) for (g, tag), n in list(self._postings.received.items())],
        )


Groups = Mapping[str, tuple[int, tuple[int, ...]]]  # by name: calls that torch counted, and ranks


def _groups() -> Groups | None:
    """Return the groups of this process; None if torch does not count their calls."""
    import torch.distributed as dist

    from distcheck.machine import compat  # imports torch, which the front end must not

    try:
        return {
            str(group.group_name): (
                compat.calls_counted(group),
                tuple(dist.get_process_group_ranks(group)),
            )
            for group in list(compat.groups())
            if dist.get_rank(group) >= 0
        }
    except (RuntimeError, KeyError, AttributeError, ValueError):
        return None


def _limits_s() -> dict[str, float]:
    """Return the timeout of each group's calls in seconds, if its backend exposes one."""
    from distcheck.machine import compat  # imports torch, which the front end must not

    found = {}
    for group in list(compat.groups()):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            found[str(group.group_name)] = compat.timeout_of(group).total_seconds()
    return found


def _as_posted(entry: dict[str, Any], postings: PostedCalls) -> PostedCall:
    """Return a collective of the flight recorder, with the details that `call_recorder` has
    recorded.
    """
    import torch.distributed as dist

    group = str((entry.get("process_group") or ("",))[0])
    number, name = flight.number_of(entry), flight.name_of(entry)
    for noted in reversed(list(postings.notes)):
        if noted.call.group == group and noted.first <= entry["op_id"] <= noted.last:
            if name in (noted.call.kind, _OF_GLOO.get(noted.call.kind)):
                return dataclasses.replace(noted.call, number=number)
            break
    kind = name if name in _KINDS else ""
    given, got = entry["input_sizes"], entry["output_sizes"]
    return PostedCall(
        kind=kind or f"{name}?",
        name=name,
        rank=dist.get_rank(),
        group=group,
        number=number,
        counts=posted_calls.counts_that_must_match(kind, given, got),
        dtype=flight.dtype_of(entry),
        sizes=tuple(map(tuple, given or got)),
        known=not (posted_calls.is_reduction(kind) or posted_calls.has_root(kind)),
        place=flight.place_of(entry),
    )


def _is_noted_message(entry: dict[str, Any]) -> bool:
    """Return True for a message of a Python backend, which `call_recorder` records."""
    return bool(entry["is_p2p"]) and entry["profiling_name"].startswith("mpi:")


def _places_of(
    noted: NotedCall, entries: list[dict[str, Any]], calls: list[PostedCall]
) -> list[int]:
    """Return the index of the awaited call in `calls`. An awaited message is first appended to
    `calls`.
    """
    if noted.call.is_message:
        calls.append(noted.call)
        return [len(calls) - 1]
    return [
        place
        for place, entry in enumerate(entries)
        if calls[place].group == noted.call.group
        and noted.first <= entry["op_id"] <= noted.last
        and flight.is_incomplete(entry)
    ]


def _is_alone(main: int) -> bool:
    """Return True if all Python threads except the main thread belong to distcheck."""
    return all(
        thread.ident == main or thread.name.startswith(OWN_THREADS)
        for thread in threading.enumerate()
    ) and len(sys._current_frames()) <= len(threading.enumerate())


OWN_THREADS = "distcheck "  # prefix of the names of distcheck's threads
