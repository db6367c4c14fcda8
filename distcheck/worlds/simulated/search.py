"""The process that tries schedules: each in a fork of itself, which runs one simulated world.

What a fork begins with is the same each time, so that two runs of one schedule differ only by what
no schedule controls. A schedule that comes to something else than the usual one is shrunk to the
fewest switches, by leaving out ever smaller parts of them.
"""

import importlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from distcheck.errors import ExitCode
from distcheck.machine.cores import cores
from distcheck.records.schedules import (
    KINDS,
    Schedule,
    ScheduleRun,
    Searched,
    Turn,
    read_schedule,
)
from distcheck.worlds import messages
from distcheck.worlds.framing import write_all
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.local.child import Reporter
from distcheck.worlds.simulated.host import Host
from distcheck.worlds.simulated.requests import SEARCH, SearchRequest

_leave = os._exit  # which a world replaces
_MOST_SHRINKING = 80  # runs; chosen
_SHARED = ("torch", "distcheck", "numpy")  # packages that run no code under test when imported
_NOT_SEEN = ("hung", "killed")  # ended by a clock or from outside, which accuses no one
_STUCK = ("deadlock", "mismatch", "unmatched")  # which may be for want of a buffer
_TURNS = 400  # of one run that are kept
_WORDS = 4000
RunAll = Callable[[Sequence[Schedule]], list[ScheduleRun]]


@SEARCH.does
def run(asked: SearchRequest, fds: Descriptors, reporter: Reporter) -> Searched:
    """The job of this process."""
    return search(Forks(asked, fds, reporter).run_all, asked.schedules)


def search(run_all: RunAll, schedules: int) -> Searched:
    """What the schedules come to."""
    usual, again = run_all([Schedule(), Schedule()])
    if usual.end != "finished" or usual.came_to != again.came_to:
        buffered = run_all([Schedule(buffered=True)])[0] if usual.end in _STUCK else None
        return Searched(usual, again, buffered=buffered)
    ran, distinct = 0, {usual.turns}
    late: list[str] = []
    seeds = range(1, schedules + 1)
    for first in range(0, schedules, _BATCH):
        runs = run_all([read_schedule(str(seed)) for seed in seeds[first : first + _BATCH]])
        ran += len(runs)
        distinct |= {one.turns for one in runs}
        late += [one.schedule for one in runs if one.end in _NOT_SEEN]
        differ = [one for one in runs if one.came_to != usual.came_to]
        found = next((one for one in differ if one.end not in _NOT_SEEN), None)
        if found is not None:
            smallest, tried = shrunk(found, usual, run_all)
            repeated = run_all([read_schedule(smallest.schedule)])[0]
            return Searched(
                usual,
                again,
                ran,
                len(distinct),
                drawn=found.schedule,
                other=smallest,
                shrinking=tried,
                repeats=repeated.came_to == smallest.came_to,
            )
    return Searched(usual, again, ran, len(distinct), late=tuple(late))


_BATCH = 4 * len(KINDS)


def shrunk(found: ScheduleRun, usual: ScheduleRun, run_all: RunAll) -> tuple[ScheduleRun, int]:
    """The run with the fewest switches that still comes to something else than the usual one, and
    how many runs that took (ddmin: Zeller and Hildebrandt, 2002).
    """
    buffered = read_schedule(found.schedule).buffered
    tried = 0

    def other(switches: Sequence[tuple[int, int]], *, buffers: bool) -> ScheduleRun | None:
        nonlocal tried
        tried += 1
        (one,) = run_all([Schedule(buffered=buffers, switches=tuple(switches))])
        return one if one.came_to != usual.came_to and one.end not in _NOT_SEEN else None

    best = found
    if buffered and (one := other(found.switches, buffers=False)):
        best, buffered = one, False
    parts = 1
    while best.switches and tried < _MOST_SHRINKING:
        switches = best.switches
        size = -(-len(switches) // parts)
        for start in range(0, len(switches), size):
            if tried >= _MOST_SHRINKING:
                break
            one = other(switches[:start] + switches[start + size :], buffers=buffered)
            if one is not None and len(one.switches) < len(switches):
                best, parts = one, max(parts - 1, 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(switches))
    told = Schedule(buffered=buffered, switches=best.switches)
    return msgspec.structs.replace(best, schedule=str(told)), tried


class Forks:
    """Runs worlds in forks of this process, as many at a time as there are cores."""

    def __init__(self, asked: SearchRequest, fds: Descriptors, reporter: Reporter) -> None:
        self._asked, self._fds, self._reporter = asked, fds, reporter
        self._ran, self._warm = 0, False

    def run_all(self, schedules: Sequence[Schedule]) -> list[ScheduleRun]:
        """What each comes to, in order."""
        waiting = list(enumerate(schedules))
        found: dict[int, ScheduleRun] = {}
        running: dict[int, _Fork] = {}
        while waiting or running:
            while waiting and len(running) < cores():
                place, schedule = waiting.pop(0)
                fork = _Fork(place, schedule, self._begin(schedule), self._asked.deadline_s)
                running[fork.fd] = fork
            ready, _, _ = select.select(list(running), [], [], 0.1)
            for fork in [*running.values()]:
                if fork.over(ready=fork.fd in ready):
                    del running[fork.fd]
                    found[fork.place] = fork.result()
                    self._ran += 1
                    self._reporter.progress(self._ran, "schedules")
        if not self._warm:
            self._warm = True
            _import_once([name for run in found.values() for name in run.imported])
        return [found[place] for place in range(len(schedules))]

    def _begin(self, schedule: Schedule) -> tuple[int, int]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._live(schedule, writing)
        os.close(writing)
        return pid, reading

    def _live(self, schedule: Schedule, fd: int) -> NoReturn:
        collected = _Collected(schedule, fd)
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            host = Host(self._asked.host, self._fds, collected, schedule)
            collected.host = host
            host.run()
            collected.finish()
        except BaseException as error:
            collected.tell("raised", f"{type(error).__name__}: {error}")
        finally:
            _leave(0)


class _Fork:
    """A fork that runs one schedule."""

    def __init__(
        self, place: int, schedule: Schedule, begun: tuple[int, int], deadline_s: float
    ) -> None:
        self.place, self._schedule = place, schedule
        self._pid, self.fd = begun
        self._until, self._told = time.monotonic() + deadline_s, b""

    def over(self, *, ready: bool) -> bool:
        """Whether it has ended; one that takes too long is ended."""
        if not ready:
            if time.monotonic() < self._until:
                return False
            os.kill(self._pid, signal.SIGKILL)
        elif chunk := os.read(self.fd, 1 << 16):
            self._told += chunk
            return False
        os.close(self.fd)
        os.waitpid(self._pid, 0)
        return True

    def result(self) -> ScheduleRun:
        """What it came to."""
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(self._told, type=ScheduleRun)
        late = time.monotonic() >= self._until
        what = "it did not end in time" if late else "its process ended without a word"
        return ScheduleRun(str(self._schedule), "hung" if late else "killed", what)


class _Collected(Reporter):
    """Takes what the ranks of one world say, and writes what it comes to."""

    def __init__(self, schedule: Schedule, fd: int) -> None:
        super().__init__(fd)
        self._schedule, self._out = schedule, fd
        self._known = set(sys.modules)
        self._results: dict[int, bytes] = {}
        self._raised: tuple[str, str] | None = None
        self.host: Host | None = None

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        """Notes what matters of an event; with a world that cannot go on, this process ends."""
        if isinstance(event, messages.Proven):
            if self._raised is None or event.how != "refused":
                self._raised = (event.how, event.what)
            self.finish()
        if not isinstance(event, messages.OfRank):
            return
        own = event.event
        if isinstance(own, messages.Done):
            self._results[event.rank] = own.payload
        elif isinstance(own, messages.Raised) and self._raised is None:
            usual = own.exit_code in (int(ExitCode.CANNOT_RUN), int(ExitCode.USAGE))
            end = "refused" if usual else "raised"
            self._raised = (end, f"rank {event.rank} raised {own.kind}: {own.message}")
        elif isinstance(own, messages.Left) and self._raised is None:
            self._raised = ("left", f"rank {event.rank} called os._exit({own.code})")

    def finish(self) -> NoReturn:
        """Writes what has been noted, and ends this process."""
        self.tell(*(self._raised or ("finished", "")))
        _leave(0)

    def _is_shared(self, name: str) -> bool:
        return name not in self._known and name.partition(".")[0] in _SHARED

    def tell(self, end: str, what: str) -> None:
        """Writes a run."""
        world: Any = None if self.host is None else self.host.world
        chooser = None if world is None else world.chooser
        results = tuple(self._results[rank] for rank in sorted(self._results))
        write_all(
            self._out,
            msgspec.msgpack.encode(
                ScheduleRun(
                    schedule=str(self._schedule),
                    end=end,
                    what=messages.printable(what[:_WORDS]),
                    results=results,
                    switches=() if chooser is None else tuple(chooser.switches),
                    imported=tuple(name for name in sys.modules if self._is_shared(name)),
                    turns=() if world is None else tuple(_turns(world.turns)),
                )
            ),
        )


def _import_once(names: Sequence[str]) -> None:
    """Imports here what every fork would import for itself."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _turns(noted: Sequence[tuple[Any, int]]) -> Iterator[Turn]:
    before = 0
    for call, switches in noted[:_TURNS]:
        words = messages.printable(call.in_words())
        where = messages.printable(call.where)
        yield Turn(call.rank, words, where, switches > before, _taken_by(call))
        before = switches


def _taken_by(call: Any) -> str:
    """Whose message a receive from any rank took, in words."""
    sent = call.sender
    if call.peer is not None or sent is None:
        return ""
    return messages.printable(f"rank {sent.rank}, by {sent.in_words()}{sent.where}")
