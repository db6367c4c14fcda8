"""The ranks of a simulated world: schedules them, matches their calls, and ends the world.

A world that cannot proceed is ended for one of three reasons. A mismatch is found when the second
call is posted. If ranks have ended while others wait for them, the others lose their peer, as in a
world of processes. If all remaining ranks are blocked, there is a deadlock.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn

from distcheck.addons.simulated import collectives
from distcheck.addons.simulated.calls import SimulatedCall
from distcheck.addons.simulated.groups import CreatedGroup, CreatedGroups
from distcheck.addons.simulated.in_flight import InFlight, unobserved
from distcheck.addons.simulated.scheduler import Scheduler, ThreadState
from distcheck.addons.simulated.schedules import SchedulePolicy
from distcheck.addons.simulated.suspicious_calls import SuspiciousCalls
from distcheck.errors import NotSimulatedError
from distcheck.records import posted_calls
from distcheck.records.odd_ranks import ranks_in_words
from distcheck.records.posted_calls import Wait, waiting_in_words, why_stuck
from distcheck.records.schedules import Schedule
from distcheck.worlds import step_calls
from distcheck.worlds.callers import place_of_caller


@dataclass(eq=False)
class MatchedCalls:
    """The calls of a group's ranks with the same number."""

    calls: dict[int, SimulatedCall] = field(default_factory=dict)
    apart: bool = False


class GroupCalls:
    """The calls of a group: collectives by number, messages by sender, receiver and tag."""

    def __init__(self, name: str, ranks: Sequence[int], order: str) -> None:
        self.name, self.ranks, self.order = name, tuple(ranks), order
        self._places = {rank: place for place, rank in enumerate(self.ranks)}
        self.meetings: dict[int, MatchedCalls] = {}
        self._posted: defaultdict[int, int] = defaultdict(int)
        self._messages: defaultdict[int, int] = defaultdict(int)
        # Unmatched messages, by receiving rank and tag, in the order of posting.
        self._sends: defaultdict[tuple[int, int], deque[SimulatedCall]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[SimulatedCall]] = defaultdict(deque)
        self.misfits: list[
            tuple[SimulatedCall, SimulatedCall]
        ] = []  # pairs of messages that do not match

    def number_for(self, rank: int, *, is_message: bool) -> int:
        """Return the number of a rank's next call, starting at 1."""
        counts = self._messages if is_message else self._posted
        counts[rank] += 1
        return counts[rank]

    def post(self, call: SimulatedCall) -> list[SimulatedCall]:
        """Post a collective. Return the calls that are thereby complete; none on a mismatch."""
        meeting = self.meetings.setdefault(call.number, MatchedCalls())
        first = next(iter(meeting.calls.values()), None)
        meeting.calls[call.rank] = call
        if first is not None and posted_calls.calls_differ(first, call):
            meeting.apart = True
        if call.kind == "all_to_all" and not meeting.apart:
            meeting.apart = posted_calls.splits_disagree(meeting.calls, self.ranks)
        if meeting.apart or len(meeting.calls) < len(self.ranks):
            return []
        del self.meetings[call.number]
        calls = [meeting.calls[rank] for rank in self.ranks]
        collectives.compute_results(calls, self.order)
        return calls

    def post_message(self, call: SimulatedCall) -> list[SimulatedCall]:
        """Post a send or a receive. Return it and its counterpart if that is already posted."""
        is_send = call.kind == "send"
        receiver = call.peer if is_send else call.rank
        assert receiver is not None
        place = (receiver, call.tag)
        own, others = (self._sends, self._receives) if is_send else (self._receives, self._sends)
        for other in others.get(place, ()):
            sent, received = (call, other) if is_send else (other, call)
            if received.peer not in (None, sent.rank):
                continue
            others[place].remove(other)
            if not others[place]:
                del others[place]
            if sent.counts != received.counts or sent.dtype != received.dtype:
                self.misfits.append((sent, received))
                return []
            received.results = [collectives.consecutive_elements(sent.inputs[0]).clone()]
            received.source, received.sender = self._places[sent.rank], sent
            sent.complete = received.complete = True
            return [sent, received]
        own[place].append(call)
        return []

    def missing(self, call: SimulatedCall) -> list[int]:
        if call.is_message:
            if call.peer is not None:
                return [call.peer]
            return [rank for rank in self.ranks if rank != call.rank]
        meeting = self.meetings.get(call.number)
        return [] if meeting is None else [r for r in self.ranks if r not in meeting.calls]

    def mismatch(self) -> str:
        """Describe the first mismatch; empty if all posted calls may still match."""
        for number, meeting in sorted(self.meetings.items()):
            if meeting.apart:
                missing = [rank for rank in self.ranks if rank not in meeting.calls]
                calls = list(meeting.calls.values())
                return posted_calls.call_mismatch_in_words(number, calls, missing)
        for sent, received in self.misfits:
            return posted_calls.message_mismatch_in_words(sent, received)
        return ""


End = Literal[
    "mismatch", "deadlock", "asleep", "refused", "tensor-used-in-flight", "work-not-waited",
    "work-waited-twice", "unmatched",
]  # fmt: skip
_KEPT = 64  # of each rank's calls, as in torch's flight recorder
_MOST_TURNS = 4096  # recorded calls of a run under a schedule


@dataclass(eq=False)
class AwaitedKeys:
    """Keys of the store that a rank waits for, and the timeout of this wait."""

    names: Sequence[str]
    limit_s: float
    timed_out: bool = False

    def __str__(self) -> str:
        return f"the store's keys {', '.join(self.names)}"


class SimulatedWorld:
    """A world of `size` ranks whose collectives reduce in `order`.

    Simulated time may advance by at most `deadline_s` at once. With a `schedule`, the ranks run in
    its order, and the first `keeps_choices` of its choices are recorded. `switch` is called between
    two ranks. `ended(how, what)` is called when the world cannot proceed; no rank runs after that.
    """

    def __init__(
        self,
        size: int,
        order: str,
        *,
        deadline_s: float,
        switch: Callable[[int, int], None],
        ended: Callable[[End, str], None],
        schedule: Schedule | None = None,
        keeps_choices: int = 0,
    ) -> None:
        self.size, self.order = size, order
        self.chooser = (
            None if schedule is None else SchedulePolicy(schedule, size, keeps=keeps_choices)
        )
        self._buffered = schedule is not None and schedule.buffered
        self.turns: list[tuple[SimulatedCall, int]] = []  # posted calls, if there is a schedule
        self.scheduler = Scheduler(
            size,
            switch=switch,
            stuck=self._end_stuck_world,
            overslept=self._overslept,
            most_sleep_s=deadline_s,
            choose=None if self.chooser is None else self.chooser.choose,
        )
        self._deadline_s = deadline_s
        self.usual_limit_s = 0.0  # a group's shorter timeout was set by the code
        self.stored: dict[str, bytes] = {}
        self.stores: list[object] = []
        self.latest: list[deque[SimulatedCall]] = [deque(maxlen=_KEPT) for _ in range(size)]
        self._channels: dict[str, GroupCalls] = {}
        self._lost: set[int] = set()  # ranks that raised or left
        self._ended = ended
        self.groups = CreatedGroups()
        self.odd = SuspiciousCalls()
        accuse_of_buffer = partial(self.accuse, "tensor-used-in-flight")
        self._in_flight = [InFlight(rank, accuse_of_buffer) for rank in range(size)]

    def enter_group(
        self, name: str, ranks: Sequence[int]
    ) -> tuple[GroupCalls, CreatedGroup | None]:
        """Register a group that the running rank creates. Return the channel that all ranks of the
        group share, and a record of the group if the code under test creates it directly.
        """
        rank = self.scheduler.rank
        made = None if rank is None else self.groups.made(rank, name, ranks)
        found = self._channels.get(name)
        if found is None or found.ranks != tuple(ranks):
            found = self._channels[name] = GroupCalls(name, ranks, self.order)
        return found, made

    def post(self, channel: GroupCalls, call: SimulatedCall) -> None:
        """Post a call of the running rank, and wake the ranks whose calls are complete with it."""
        self.latest[call.rank].append(call)
        step_calls.record_call_of_rank(call.rank, call.kind, (call.inputs, call.outputs), 0)
        self._in_flight[call.rank].begin(call)
        with unobserved():
            self.odd.posted(call)
            done = channel.post_message(call) if call.is_message else channel.post(call)
            if done:
                self.odd.met(done)
        for one in done:
            if self.scheduler.runners[one.rank].waits_for is one:
                self.scheduler.wake(one.rank)
        if self._buffered and call.kind == "send" and not call.complete:
            with unobserved():
                call.inputs = [tensor.detach().clone() for tensor in call.inputs]
            call.complete = call.delivered = True
        if self.chooser is not None:
            if len(self.turns) < _MOST_TURNS:
                self.turns.append((call, len(self.chooser.preemptions)))
            self.scheduler.offer()

    def wait(self, call: SimulatedCall) -> None:
        """Let other ranks run until a call is complete, then write its results."""
        self.running_rank("waits for a collective")
        while not call.complete:
            self.scheduler.block(call)
            if call.timed_out and not call.complete:
                self.refuse(f"the time limit of {call.limit_s:g} s passes for {call.in_words()}")
        self._in_flight[call.rank].end(call)
        if not call.delivered:
            with unobserved():
                collectives.write_call_results(call)

    def look(self, call: SimulatedCall) -> bool:
        """Return True if a call is complete. Lets other ranks run first, so that polling code
        terminates.
        """
        self.running_rank("requests a collective")
        if not call.complete:
            self.scheduler.give_way()
        if call.complete:
            self.wait(call)
        return call.complete

    def wait_again(self, call: SimulatedCall) -> None:
        """Record that the code under test waits for a Work. With gloo, a second wait for the same
        message never returns (measured with torch 2.15), so it ends the world.
        """
        call.waits += 1
        if call.waits > 1 and call.is_message:
            place = place_of_caller()
            what = f"rank {call.rank} waits{f' at {place}' * bool(place)} for {call.in_words()}"
            self.accuse("work-waited-twice", f"{what}{call.where}, which it already waited for")

    def end_of_rank(self, rank: int) -> None:
        """Check, when the job of a rank ends, that the rank has waited for all of its calls."""
        for call in self._in_flight[rank].not_waited_for():
            received = "" if call.complete or not call.is_message else (
                ", which no call of another rank matches"
            )  # fmt: skip
            self.accuse(
                "work-not-waited",
                f"rank {rank} called {call.in_words()}{call.where}, for which it never waited"
                f"{received}",
            )

    def accuse(self, how: End, what: str) -> NoReturn:
        """End the world because of an error in the running rank."""
        self._ended(how, what)
        self.scheduler.freeze()

    def read(self, rank: int, tensor: Any, how: str) -> None:
        """Check a tensor method that reads memory directly."""
        self._in_flight[rank].read(tensor, how)

    def wait_for_store(self, keys: Sequence[str], limit_s: float = math.inf) -> None:
        """Let other ranks run until all keys are set. `limit_s` is a timeout set by the code."""
        wanted = AwaitedKeys(keys, limit_s)
        while not all(key in self.stored for key in keys):
            self.scheduler.block(wanted)
            if wanted.timed_out and not all(key in self.stored for key in keys):
                self.refuse(f"the time limit of {limit_s:g} s passes for {wanted}")

    def wake_store(self) -> None:
        """Make the ranks that wait for the store check it again."""
        for runner in self.scheduler.runners:
            if isinstance(runner.waits_for, AwaitedKeys):
                self.scheduler.wake(runner.rank)

    def running_rank(self, does: str) -> int:
        """Return the rank of this thread. Ends the world if the code under test has started the
        thread.
        """
        rank = self.scheduler.rank
        if rank is None:
            self.refuse(f"a thread that belongs to no rank {does}")
        return rank

    def refuse(self, what: str) -> NoReturn:
        self._ended("refused", what)
        if self.scheduler.rank is not None:
            self.scheduler.freeze()
        raise NotSimulatedError(what)

    def lose(self, rank: int) -> None:
        """Record that a rank has raised or exited, so that ranks blocked on it lose their peer."""
        self._lost.add(rank)

    def _end_stuck_world(self) -> None:
        matched = (channel.mismatch() for channel in self._channels.values())
        for said in (self.groups.mismatch(), *matched):
            if said:
                self._ended("mismatch", said)
                self.scheduler.freeze()
        if self._lost:
            self._lose_peers()
            return
        if self._time_out():
            return
        self._ended(*why_stuck(self._waits(), self._finished_ranks()))
        self.scheduler.freeze()

    def _time_out(self) -> bool:
        """Wake the blocked rank with the shortest timeout that the code has set. The rank may
        continue after that, so no deadlock is proven. Without a clock it is unknown which rank
        would time out first.
        """
        waiting = [r for r in self.scheduler.runners if r.state is ThreadState.WAITING]
        first = min(waiting, key=lambda runner: runner.waits_for.limit_s, default=None)
        if first is None or first.waits_for.limit_s == math.inf:
            return False
        first.waits_for.timed_out = True
        self.scheduler.wake(first.rank)
        return True

    def _overslept(self, rank: int, seconds: float) -> None:
        waiting = waiting_in_words(self._waits(), self._finished_ranks())
        self._ended(
            "asleep",
            f"rank {rank} sleeps for {seconds:g} s, longer than the deadline of "
            f"{self._deadline_s:g} s{'; ' * bool(waiting)}{waiting}",
        )
        self.scheduler.freeze()

    def _lose_peers(self) -> None:
        """Make the ranks that are blocked on an ended rank lose their peer; if there are none, all
        blocked ranks.
        """
        waiting = [r for r in self.scheduler.runners if r.state is ThreadState.WAITING]
        direct = [r for r in waiting if self._lost.intersection(self._missing(r.waits_for))]
        for runner in direct or waiting:
            gone = ranks_in_words(self._lost)
            self.scheduler.wake(
                runner.rank, RuntimeError(f"Connection closed by peer: {gone} ended before this")
            )

    def _missing(self, waits_for: Any) -> list[int]:
        if not isinstance(waits_for, SimulatedCall):
            return []
        return self._channels[waits_for.group].missing(waits_for)

    def _waits(self) -> dict[int, Wait]:
        found = {}
        for runner in self.scheduler.runners:
            on = runner.waits_for
            if runner.state is ThreadState.WAITING:
                call = on if isinstance(on, SimulatedCall) else None
                ranks = self._channels[call.group].ranks if call else ()
                words = "" if call else f"for {on}"
                found[runner.rank] = Wait(call, self._missing(on), words, ranks)
        return found

    def _finished_ranks(self) -> list[int]:
        return [
            runner.rank for runner in self.scheduler.runners if runner.state is ThreadState.OVER
        ]


_here: SimulatedWorld | None = None


def set_current_world(world: SimulatedWorld) -> None:
    global _here
    _here = world


def current_world() -> SimulatedWorld:
    """Return the simulated world of this process. Raises NotSimulatedError if there is none."""
    if _here is None:
        raise NotSimulatedError(
            "backend simulated works only in ranks that distcheck started for it"
        )
    return _here
