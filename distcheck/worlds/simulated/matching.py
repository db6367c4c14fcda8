"""Calls of one group: those with the same number must be alike, and messages must fit.

A call that does not fit what another rank has posted under its number is a mismatch, whatever
comes after. Its rank waits, until every rank that can still run has come to its own call: then it
is known what each of them called, and which is the odd one.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from distcheck.records import posted_calls
from distcheck.worlds.simulated import collectives
from distcheck.worlds.simulated.calls import SimulatedCall


@dataclass(eq=False)
class Meeting:
    """The calls of a group that have one number."""

    calls: dict[int, SimulatedCall] = field(default_factory=dict)
    apart: bool = False


class Channel:
    """A group's calls: collectives by number, messages by their ends and tag."""

    def __init__(self, name: str, ranks: Sequence[int], order: str) -> None:
        self.name, self.ranks, self.order = name, tuple(ranks), order
        self._places = {rank: place for place, rank in enumerate(self.ranks)}
        self.meetings: dict[int, Meeting] = {}
        self._posted: defaultdict[int, int] = defaultdict(int)
        self._messages: defaultdict[int, int] = defaultdict(int)
        # Those that nothing has met, by the rank that receives and the tag, as they were posted.
        self._sends: defaultdict[tuple[int, int], deque[SimulatedCall]] = defaultdict(deque)
        self._receives: defaultdict[tuple[int, int], deque[SimulatedCall]] = defaultdict(deque)
        self.misfits: list[
            tuple[SimulatedCall, SimulatedCall]
        ] = []  # messages that do not fit each other

    def number_for(self, rank: int, *, is_message: bool) -> int:
        """The number of a rank's next call, from 1."""
        counts = self._messages if is_message else self._posted
        counts[rank] += 1
        return counts[rank]

    def post(self, call: SimulatedCall) -> list[SimulatedCall]:
        """Takes a collective; returns the calls that it completes. A mismatch completes none."""
        meeting = self.meetings.setdefault(call.number, Meeting())
        first = next(iter(meeting.calls.values()), None)
        meeting.calls[call.rank] = call
        if first is not None and posted_calls.are_apart(first, call):
            meeting.apart = True
        if call.kind == "all_to_all" and not meeting.apart:
            meeting.apart = posted_calls.splits_are_apart(meeting.calls, self.ranks)
        if meeting.apart or len(meeting.calls) < len(self.ranks):
            return []
        del self.meetings[call.number]
        calls = [meeting.calls[rank] for rank in self.ranks]
        collectives.compute(calls, self.order)
        return calls

    def post_message(self, call: SimulatedCall) -> list[SimulatedCall]:
        """Takes a send or a receive; returns both where another one fits it."""
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
            received.results = [collectives.memory_of(sent.inputs[0]).clone()]
            received.source, received.sender = self._places[sent.rank], sent
            sent.complete = received.complete = True
            return [sent, received]
        own[place].append(call)
        return []

    def missing(self, call: SimulatedCall) -> list[int]:
        """The ranks that a call waits for."""
        if call.is_message:
            if call.peer is not None:
                return [call.peer]
            return [rank for rank in self.ranks if rank != call.rank]
        meeting = self.meetings.get(call.number)
        return [] if meeting is None else [r for r in self.ranks if r not in meeting.calls]

    def mismatch(self) -> str:
        """What does not match, in a sentence; empty where everything may still match."""
        for number, meeting in sorted(self.meetings.items()):
            if meeting.apart:
                missing = [rank for rank in self.ranks if rank not in meeting.calls]
                calls = list(meeting.calls.values())
                return posted_calls.meeting_in_words(number, calls, missing)
        for sent, received in self.misfits:
            return posted_calls.message_in_words(sent, received)
        return ""
