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
from distcheck.worlds.call_log import LoggedCall
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


def _logs(children: Sequence[Child]) -> dict[int, list[LoggedCall]]:
    """What each rank has logged, as far as a rank can have called it."""
    world = len(children)
    return {
        rank: [call for call in child.called if _fits(call, rank, world)]
        for rank, child in enumerate(children)
    }


def _fits(call: LoggedCall, rank: int, world: int) -> bool:
    """Whether a call names ranks that there are: any code may have written it."""
    places = range(len(call.ranks))
    named = [place for place in (call.root, call.peer) if place is not None]
    return (
        len(set(call.ranks)) == len(call.ranks)
        and set(call.ranks) <= set(range(world))
        and rank in call.ranks
        and all(place in places for place in named)
    )


def _collectives_apart(logs: Mapping[int, Sequence[LoggedCall]]) -> str:
    meetings: defaultdict[Key, dict[int, Posted]] = defaultdict(dict)
    for rank, own in logs.items():
        for call in own:
            if call.kind not in ("send", "recv"):
                meetings[call.group, call.ranks, call.number][rank] = _posted(call, rank)
    for group, ranks, number in sorted(meetings, key=lambda key: (key[2], key[0])):
        there = meetings[group, ranks, number]
        calls = list(there.values())
        one = next((call for call in calls if call.known), calls[0])
        differ = any(posted_calls.are_apart(one, other) for other in calls)
        if differ or (one.kind == "all_to_all" and posted_calls.splits_are_apart(there, ranks)):
            unknown = [rank for rank in ranks if rank not in there]
            return posted_calls.meeting_in_words(number, calls, [], unknown)
    return ""


def _messages_apart(logs: Mapping[int, Sequence[LoggedCall]]) -> str:
    """A send and the receive of its number, between two ranks of which the receiver takes from no
    others.
    """
    for rank, calls in logs.items():
        if any(call.kind == "recv" and call.peer is None for call in calls):
            continue
        for call in calls:
            if call.kind != "recv" or call.peer is None:
                continue
            received, sender = _posted(call, rank), call.ranks[call.peer]
            for other in logs.get(sender, ()):
                same = (other.group, other.ranks, other.tag, other.number) == (
                    call.group, call.ranks, call.tag, call.number
                )  # fmt: skip
                if other.kind != "send" or not same or other.peer is None:
                    continue
                sent = _posted(other, sender)
                meets = sent.peer == rank
                if meets and (sent.counts, sent.dtype) != (received.counts, received.dtype):
                    return posted_calls.message_in_words(sent, received)
    return ""


def _posted(call: LoggedCall, rank: int) -> Posted:
    given, got = call.input_sizes, call.output_sizes
    reduces, rooted = posted_calls.reduces(call.kind), posted_calls.has_root(call.kind)
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    if call.kind == "all_to_all":
        splits = call.splits if len(call.splits) == 2 else ()
        sent, received = posted_calls.splits_of(call.name, splits, given, got, len(call.ranks))
    return Posted(
        kind=call.kind,
        name=call.name,
        rank=rank,
        group=call.group,
        number=call.number,
        op=call.op if reduces else "",
        root=None if call.root is None or not rooted else call.ranks[call.root],
        peer=None if call.peer is None else call.ranks[call.peer],
        tag=call.tag,
        in_splits=sent,
        out_splits=received,
        counts=posted_calls.counts_of(call.kind, given, got),
        dtype=call.dtype,
        sizes=tuple(map(tuple, given or got)),
        known=not (reduces and not call.op) and (call.kind != "all_to_all" or bool(sent)),
        place=call.place,
    )
