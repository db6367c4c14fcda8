"""Whether ranks of a failed world failed because their calls do not match: by what they logged.

A library that receives another size than a call expects raises, or aborts the process, at once: no
rank has said by then that it waits. Calls of one number that are apart are wrong whether ranks wait
for them or not; they are taken for the cause only where a rank failed within a call.
"""

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence

from distcheck.records import posted_calls
from distcheck.records.posted_calls import Posted
from distcheck.worlds.blame import SIZES_DIFFER
from distcheck.worlds.call_log import Logged
from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import Proven, printable

# What a library that reads or writes beyond its memory ends in, or that gives up.
_FATAL = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE)
Key = tuple[str, tuple[int, ...], int]  # of a collective: its group, the ranks of that, its number


def mismatch_of(cause: Child, children: Sequence[Child]) -> Proven | None:
    """The calls that do not match, if the rank that failed first failed within a call."""
    within = cause.raised is not None and cause.raised.within_call
    died = cause.exit_signal in _FATAL and (cause.was_within_call or SIZES_DIFFER in cause.output)
    if not (within or died):
        return None
    logs = _logs(children)
    what = _collectives_apart(logs) or _messages_apart(logs)
    return Proven("mismatch", printable(what)) if what else None


def or_earlier(proven: Proven, children: Sequence[Child]) -> Proven:
    """What proves that a world can go no further; or, if it is a deadlock, calls that do not match
    and completed all the same, as a library may let them: what came after them is a consequence.
    """
    if proven.how == "mismatch":
        return proven
    what = _collectives_apart(_logs(children))
    return Proven("mismatch", printable(what)) if what else proven


def _logs(children: Sequence[Child]) -> dict[int, list[Logged]]:
    """What each rank has logged, as far as a rank can have called it."""
    world = len(children)
    return {
        rank: [logged for logged in child.called if _fits(logged, rank, world)]
        for rank, child in enumerate(children)
    }


def _fits(logged: Logged, rank: int, world: int) -> bool:
    """Whether a call names ranks that there are: any code may have written it."""
    call, ranks = logged.call, {*logged.ranks}
    named = {other for other in (call.root, call.peer) if other is not None}
    alone = len(ranks) == len(logged.ranks)
    return alone and ranks <= {*range(world)} and rank == call.rank in ranks and named <= ranks


def _collectives_apart(logs: Mapping[int, Sequence[Logged]]) -> str:
    meetings: defaultdict[Key, dict[int, Posted]] = defaultdict(dict)
    for rank, calls_of_rank in logs.items():
        for logged in calls_of_rank:
            if not (call := logged.call).is_message:
                meetings[call.group, logged.ranks, call.number][rank] = call
    for group, ranks, number in sorted(meetings, key=lambda key: (key[2], key[0])):
        there = meetings[group, ranks, number]
        calls = list(there.values())
        one = next((call for call in calls if call.known), calls[0])
        differ = any(posted_calls.are_apart(one, other) for other in calls)
        if differ or (one.kind == "all_to_all" and posted_calls.splits_are_apart(there, ranks)):
            unknown = [rank for rank in ranks if rank not in there]
            return posted_calls.meeting_in_words(number, calls, [], unknown)
    return ""


def _messages_apart(logs: Mapping[int, Sequence[Logged]]) -> str:
    """A send and the receive of its number, between two ranks of which the receiver takes from no
    others.
    """
    sent = {
        (logged.ranks, call.group, call.tag, call.number, call.rank, call.peer): call
        for calls in logs.values()
        for logged in calls
        if (call := logged.call).kind == "send"
    }
    for rank, calls in logs.items():
        received = [one for one in calls if one.call.kind == "recv"]
        if any(one.call.peer is None for one in received):
            continue
        for ranks, call in ((one.ranks, one.call) for one in received):
            assert call.peer is not None
            other = sent.get((ranks, call.group, call.tag, call.number, call.peer, rank))
            if other and (other.counts, other.dtype) != (call.counts, call.dtype):
                return posted_calls.message_in_words(other, call)
    return ""
