"""Calls of one group: those with the same number must be alike, and messages must fit.

A call that does not fit what another rank has posted under its number is a mismatch, whatever
comes after. Its rank waits, until every rank that can still run has come to its own call: then it
is known what each of them called, and which is the odd one.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distcheck.backends.simulated import collectives
from distcheck.backends.simulated.calls import Call
from distcheck.records.odd_ranks import ranks_in_words

_MOST_SITES = 4  # of one kind of call, that a sentence names


@dataclass(eq=False)
class Meeting:
    """The calls of a group that have one number."""

    calls: dict[int, Call] = field(default_factory=dict)
    apart: bool = False


class Channel:
    """A group's calls: collectives by number, messages by their ends and tag."""

    def __init__(self, name: str, ranks: Sequence[int], order: str) -> None:
        self.name, self.ranks, self.order = name, tuple(ranks), order
        self.meetings: dict[int, Meeting] = {}
        self._posted: defaultdict[int, int] = defaultdict(int)
        self._messages: defaultdict[int, int] = defaultdict(int)
        self._sends: deque[Call] = deque()
        self._receives: deque[Call] = deque()
        self.misfits: list[tuple[Call, Call]] = []  # messages that do not fit each other

    def number_for(self, rank: int, *, is_message: bool) -> int:
        """The number of a rank's next call, from 1."""
        counts = self._messages if is_message else self._posted
        counts[rank] += 1
        return counts[rank]

    def post(self, call: Call) -> list[Call]:
        """Takes a collective; returns the calls that it completes. A mismatch completes none."""
        meeting = self.meetings.setdefault(call.number, Meeting())
        first = next(iter(meeting.calls.values()), None)
        meeting.calls[call.rank] = call
        if first is not None and first.signature() != call.signature():
            meeting.apart = True
        if call.kind == "all_to_all" and not meeting.apart:
            meeting.apart = self._splits_differ(meeting, call)
        if meeting.apart or len(meeting.calls) < len(self.ranks):
            return []
        del self.meetings[call.number]
        calls = [meeting.calls[rank] for rank in self.ranks]
        collectives.compute(calls, self.order)
        return calls

    def post_message(self, call: Call) -> list[Call]:
        """Takes a send or a receive; returns both where another one fits it."""
        own, others = (
            (self._sends, self._receives) if call.kind == "send" else (self._receives, self._sends)
        )
        for other in others:
            sent, received = (call, other) if call.kind == "send" else (other, call)
            if not _meet(sent, received):
                continue
            others.remove(other)
            if sent.counts != received.counts or sent.dtype != received.dtype:
                self.misfits.append((sent, received))
                return []
            received.results = [collectives.memory_of(sent.inputs[0]).clone()]
            received.source = self.ranks.index(sent.rank)
            sent.complete = received.complete = True
            return [sent, received]
        own.append(call)
        return []

    def missing(self, call: Call) -> list[int]:
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
                return _apart_in_words(number, meeting, self.ranks)
        for sent, received in self.misfits:
            return (
                f"rank {sent.rank} called {sent.in_words()}{sent.where}, and rank {received.rank} "
                f"called {received.in_words()}{received.where}: {_differs([sent, received])}"
            )
        return ""

    def _splits_differ(self, meeting: Meeting, call: Call) -> bool:
        own = self.ranks.index(call.rank)
        for rank, other in meeting.calls.items():
            place = self.ranks.index(rank)
            if call.in_splits[place] != other.out_splits[own]:
                return True
            if call.out_splits[place] != other.in_splits[own]:
                return True
        return False


def _meet(sent: Call, received: Call) -> bool:
    return (
        received.peer in (None, sent.rank)
        and sent.peer == received.rank
        and sent.tag == received.tag
    )


def _apart_in_words(number: int, meeting: Meeting, ranks: Sequence[int]) -> str:
    calls = [meeting.calls[rank] for rank in sorted(meeting.calls)]
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(f"{call.in_words()}{_splits(call)}", []).append(call)
    said = list(_by_group(groups))
    missing = [rank for rank in ranks if rank not in meeting.calls]
    absent = f"; {ranks_in_words(missing)} did not come to it" if missing else ""
    return f"at call {number}, {' and '.join(said)}: {_differs(calls)}{absent}; {_odd(groups)}"


def _splits(call: Call) -> str:
    if call.kind != "all_to_all":
        return ""
    return f" (sends {list(call.in_splits)}, receives {list(call.out_splits)} elements)"


def _by_group(groups: dict[str, list[Call]]) -> Iterator[str]:
    for words, calls in groups.items():
        sites = list(dict.fromkeys(call.where for call in calls))[:_MOST_SITES]
        at = " and".join(filter(None, sites))
        yield f"{ranks_in_words([call.rank for call in calls])} called {words}{at}"


def _differs(calls: Sequence[Call]) -> str:
    found = [call.signature() for call in calls]
    names = [
        name
        for name in found[0]
        if name != "operation" and any(s[name] != found[0][name] for s in found)
    ]
    if not calls[0].is_message and len({call.kind for call in calls}) > 1:
        names = ["operation"]
    if not names and calls[0].kind == "all_to_all":
        names = ["split sizes"]
    return f"they differ in the {' and the '.join(names)}"


def _odd(groups: dict[str, list[Call]]) -> str:
    sizes = sorted((len(calls) for calls in groups.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return "the groups are equally large, so it is not known which is wrong"
    most = max(groups.values(), key=len)
    odd = sorted(c.rank for calls in groups.values() if calls is not most for c in calls)
    return f"most ranks agree, and {ranks_in_words(odd)} did something else"
