"""Process that tries schedules in forks of itself. Each fork runs one simulated world, or several
in sequence.

All worlds begin in the same state, so two runs of one schedule differ only by influences that the
schedule does not control. If a schedule leads to another result than the default schedule, smaller
and smaller subsets of its preemptions are tried, until only the necessary ones are left.
"""

import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import msgspec

from distcheck.addons.simulated.host import SimulatedHost
from distcheck.addons.simulated.schedules import NOT_SEEN, TURNS, ScheduleTree, random_schedules
from distcheck.addons.simulated.share import SEARCH, SearchRequest
from distcheck.errors import ExitCode
from distcheck.machine.resources import cores
from distcheck.records.schedules import (
    PostedTurn,
    Schedule,
    ScheduleRun,
    ScheduleSearchResult,
    parse_schedule,
)
from distcheck.worlds import messages
from distcheck.worlds.framing import Frames, frame, write_all
from distcheck.worlds.jobs import Descriptors, Reporter

_leave = os._exit  # a world replaces os._exit
_REPEATS = 2  # Heuristic: of both schedules, once they differ
_MOST_SHRINKING = 80  # Heuristic: runs
_SHARED = ("torch", "distcheck", "numpy")  # packages whose import runs no code under test
_STUCK = ("deadlock", "mismatch", "unmatched")  # ends that a missing buffer may have caused
_NO_WORD = "its process exited without an error message"
_CHOICES = 4096  # recorded choices of one run, if its schedules are enumerated
_WORDS = 4000
_MOST_TOGETHER = 32  # Heuristic: schedules that one process runs


class ScheduleRunner(Protocol):
    """Runs schedules and returns their results, in order.

    Each schedule runs in its own process. If the `usual` run is given, several schedules share a
    process, and the list ends with the first result that differs from `usual`.
    """

    def __call__(
        self, schedules: Sequence[Schedule], *, usual: ScheduleRun | None = None
    ) -> list[ScheduleRun]: ...


@SEARCH.does
def run(asked: SearchRequest, fds: Descriptors, reporter: Reporter) -> ScheduleSearchResult:
    return search(ScheduleForks(asked, fds, reporter).run_all, asked.schedules, asked.preemptions)


def search(run_all: ScheduleRunner, schedules: int, preemptions: int = 0) -> ScheduleSearchResult:
    """Return the results of random schedules or, with `preemptions`, of all schedules with at most
    that many preemptions.
    """
    usual, again = run_all([Schedule(), Schedule()])
    if usual.end != "finished" or usual.came_to != again.came_to:
        buffered = run_all([Schedule(buffered=True)])[0] if usual.end in _STUCK else None
        return ScheduleSearchResult(usual, again, buffered=buffered)
    tree = ScheduleTree(usual, preemptions) if preemptions else None
    ran, distinct = 0, {usual.turns}
    late: list[str] = []
    for round_ in tree.rounds(schedules) if tree is not None else random_schedules(schedules):
        runs = run_all(round_, usual=usual)
        ran += len(runs)
        distinct |= {one.turns for one in runs}
        late += [one.schedule for one in runs if one.end in NOT_SEEN]
        differ = [one for one in runs if one.came_to != usual.came_to]
        found = next((one for one in differ if one.end not in NOT_SEEN), None)
        if found is not None:
            smallest, tried = minimize_preemptions(found, usual, run_all)
            for one in run_all([Schedule()] * _REPEATS):
                if _ended_differently(
                    one, usual
                ):  # nondeterministic, so the other result may be as well
                    return ScheduleSearchResult(usual, one)
            repeated = run_all([parse_schedule(smallest.schedule)] * _REPEATS)
            return ScheduleSearchResult(
                usual,
                again,
                ran,
                len(distinct),
                drawn=found.schedule,
                other=smallest,
                shrinking=tried,
                repeats=not any(_ended_differently(one, smallest) for one in repeated),
            )
        if tree is not None:
            tree.enter(runs)
    covered = None if tree is None else tree.covered
    return ScheduleSearchResult(usual, again, ran, len(distinct), late=tuple(late), covered=covered)


def _ended_differently(one: ScheduleRun, other: ScheduleRun) -> bool:
    return one.came_to != other.came_to and one.end not in NOT_SEEN


def minimize_preemptions(
    found: ScheduleRun, usual: ScheduleRun, run_all: ScheduleRunner
) -> tuple[ScheduleRun, int]:
    """Return the run with the fewest preemptions that still differs from the default run, and the
    number of runs that were needed (ddmin: Zeller and Hildebrandt, 2002).
    """
    buffered = parse_schedule(found.schedule).buffered
    tried = 0

    def other(preemptions: Sequence[tuple[int, int]], *, buffers: bool) -> ScheduleRun | None:
        nonlocal tried
        tried += 1
        (one,) = run_all([Schedule(buffered=buffers, preemptions=tuple(preemptions))])
        return one if one.came_to != usual.came_to and one.end not in NOT_SEEN else None

    best = found
    if buffered and (one := other(found.preemptions, buffers=False)):
        best, buffered = one, False
    parts = 1
    while best.preemptions and tried < _MOST_SHRINKING:
        preemptions = best.preemptions
        size = -(-len(preemptions) // parts)
        for start in range(0, len(preemptions), size):
            if tried >= _MOST_SHRINKING:
                break
            one = other(preemptions[:start] + preemptions[start + size :], buffers=buffered)
            if one is not None and len(one.preemptions) < len(preemptions):
                best, parts = one, max(parts - 1, 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(preemptions))
    smallest = Schedule(buffered=buffered, preemptions=best.preemptions)
    return msgspec.structs.replace(best, schedule=str(smallest)), tried


class ScheduleForks:
    """Runs worlds in forks of this process; one per core at a time."""

    def __init__(self, asked: SearchRequest, fds: Descriptors, reporter: Reporter) -> None:
        self._asked, self._fds, self._reporter = asked, fds, reporter
        self._ran, self._warm, self._together = 0, False, True

    def run_all(
        self, schedules: Sequence[Schedule], *, usual: ScheduleRun | None = None
    ) -> list[ScheduleRun]:
        """Return the result of each schedule, in order: see `ScheduleRunner`.

        A process that runs several schedules runs the default schedule last. If its result differs
        from `usual`, the code under test has left state behind; each schedule then gets its own
        process.
        """
        if usual is None:
            runs = [run for (run,) in self._run_in_forks([[schedule] for schedule in schedules])]
            if not self._warm:
                self._warm = True
                _import_once([name for run in runs for name in run.imported])
                gc.freeze()  # garbage collection in a fork would copy all of it
            return runs
        count = -(-len(schedules) // cores())
        size = min(count, _MOST_TOGETHER) if self._together else 1
        parts = [schedules[first : first + size] for first in range(0, len(schedules), size)]
        last = [Schedule()] if self._together else []
        found: list[ScheduleRun] = []
        for part, runs in zip(parts, self._run_in_forks([[*p, *last] for p in parts]), strict=True):
            sound = not last or runs[-1].came_to == usual.came_to
            self._together = self._together and sound
            for schedule, run in zip(part, runs, strict=False):
                if last and (not sound or run.came_to != usual.came_to):
                    (run,) = self.run_all([schedule])
                found.append(run)
                if run.came_to != usual.came_to and run.end not in NOT_SEEN:
                    return found
        return found

    def _run_in_forks(self, parts: Sequence[Sequence[Schedule]]) -> list[list[ScheduleRun]]:
        waiting = list(enumerate(parts))
        found: dict[int, list[ScheduleRun]] = {}
        running: dict[int, _Fork] = {}
        while waiting or running:
            while waiting and len(running) < cores():
                place, part = waiting.pop(0)
                fork = _Fork(place, part, self._fork_run(part), self._asked.deadline_s)
                running[fork.fd] = fork
            ready, _, _ = select.select(list(running), [], [], 0.1)
            for fork in [*running.values()]:
                before = len(fork.runs)
                if fork.over(ready=fork.fd in ready):
                    del running[fork.fd]
                    found[fork.place] = fork.runs
                if len(fork.runs) > before:
                    self._ran += len(fork.runs) - before
                    self._reporter.progress(self._ran, "schedules")
        return [found[place] for place in range(len(parts))]

    def _fork_run(self, schedules: Sequence[Schedule]) -> tuple[int, int]:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._live(schedules, writing)
        os.close(writing)
        return pid, reading

    def _live(self, schedules: Sequence[Schedule], fd: int) -> NoReturn:
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            for schedule in schedules:
                collected = _Collected(schedule, fd, tells_imports=not self._warm)
                try:
                    collected.host = SimulatedHost(
                        self._asked.host,
                        self._fds,
                        collected,
                        schedule,
                        keeps_choices=_CHOICES if self._asked.preemptions else 0,
                    )
                    collected.host.run()
                except BaseException as error:
                    collected.tell("raised", f"{type(error).__name__}: {error}")
                    break
                if not collected.finish() or threading.active_count() > 1:
                    break  # the next world must not begin with this one's leftovers
        finally:
            _leave(0)


class _Fork:
    """A fork that runs schedules in sequence. `runs` are the finished ones."""

    def __init__(
        self, place: int, schedules: Sequence[Schedule], begun: tuple[int, int], deadline_s: float
    ) -> None:
        self.place, self._schedules, self._deadline_s = place, schedules, deadline_s
        self._pid, self.fd = begun
        self._until, self._frames = time.monotonic() + deadline_s, Frames(ScheduleRun)
        self.runs: list[ScheduleRun] = []

    def over(self, *, ready: bool) -> bool:
        """Return True if the fork has ended. A fork that exceeds the deadline is killed."""
        late = False
        if not ready:
            late = time.monotonic() >= self._until
            if not late:
                return False
            os.kill(self._pid, signal.SIGKILL)
        elif chunk := os.read(self.fd, 1 << 16):
            with suppress(msgspec.MsgspecError):
                if said := self._frames.feed(chunk):
                    self.runs += said
                    self._until = time.monotonic() + self._deadline_s
            return False
        os.close(self.fd)
        os.waitpid(self._pid, 0)
        end, what = ("hung", "it did not finish in time") if late else ("killed", _NO_WORD)
        for schedule in self._schedules[len(self.runs) :]:
            self.runs.append(ScheduleRun(str(schedule), end, what))
        return True


class _Collected(Reporter):
    """Collects the messages of a world's ranks, and writes the result of the world."""

    def __init__(self, schedule: Schedule, fd: int, *, tells_imports: bool) -> None:
        super().__init__(fd)
        self._schedule, self._out = schedule, fd
        self._known = set(sys.modules) if tells_imports else None
        self._results: dict[int, bytes] = {}
        self._raised: tuple[str, str] | None = None
        self.host: SimulatedHost | None = None

    def send(self, event: messages.AnyEvent, *, patience_s: float = -1) -> None:
        """Record the relevant part of an event. Ends this process if the world cannot proceed."""
        if isinstance(event, messages.Proven):
            if self._raised is None or event.how != "refused":
                self._raised = (event.how, event.what)
            self.finish()
            _leave(0)
        if not isinstance(event, messages.RoutedEvent):
            return
        own = event.event
        if isinstance(own, messages.Done):
            self._results[event.key] = own.payload
        elif isinstance(own, messages.Raised) and self._raised is None:
            usual = own.exit_code in (int(ExitCode.CANNOT_RUN), int(ExitCode.USAGE))
            end = "refused" if usual else "raised"
            self._raised = (end, f"rank {event.key} raised {own.kind}: {own.message}")
        elif isinstance(own, messages.Exited) and self._raised is None:
            self._raised = ("left", f"rank {event.key} called os._exit({own.code})")

    def finish(self) -> bool:
        """Write the result. Return True if all ranks have finished."""
        self.tell(*(self._raised or ("finished", "")))
        return self._raised is None

    def _imported_modules(self) -> tuple[str, ...]:
        """Return the shared modules that this run has imported. Without `_import_once`, every run
        would import them again.
        """
        if self._known is None:
            return ()
        new = (name for name in sys.modules if name not in self._known)
        return tuple(name for name in new if name.partition(".")[0] in _SHARED)

    def tell(self, end: str, what: str) -> None:
        world: Any = None if self.host is None else self.host.world
        chooser = None if world is None else world.chooser
        results = tuple(self._results[rank] for rank in sorted(self._results))
        write_all(
            self._out,
            frame(
                ScheduleRun(
                    schedule=str(self._schedule),
                    end=end,
                    what=messages.printable(what[:_WORDS]),
                    results=results,
                    preemptions=() if chooser is None else tuple(chooser.preemptions),
                    choices=() if chooser is None else tuple(chooser.choices),
                    cut=chooser is not None and chooser.cut,
                    imported=self._imported_modules(),
                    turns=() if world is None else tuple(_make_turns(world.turns)),
                )
            ),
        )


def _import_once(names: Sequence[str]) -> None:
    """Import modules in this process, so that its forks do not have to import them."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _make_turns(noted: Sequence[tuple[Any, int]]) -> Iterator[PostedTurn]:
    before = 0
    for call, preemptions in noted[:TURNS]:
        words = messages.printable(call.in_words())
        where = messages.printable(call.where)
        yield PostedTurn(call.rank, words, where, preemptions > before, _taken_by(call))
        before = preemptions


def _taken_by(call: Any) -> str:
    """Describe the send whose message a receive from any rank received; empty for other calls."""
    sent = call.sender
    if call.peer is not None or sent is None:
        return ""
    return messages.printable(f"rank {sent.rank}, by {sent.in_words()}{sent.where}")
