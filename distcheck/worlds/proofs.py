"""Proves a deadlock or a collective mismatch in a world of processes.

A proof needs every rank to report that it is blocked or finished. A rank that computes, sleeps, or
waits for something that distcheck does not observe never reports: its world runs until the
deadline. A rank retracts its report before it resumes, and only a running rank posts calls, so all
reports hold at one instant.
"""

from collections.abc import Iterator, Mapping, Sequence

from distcheck.records import posted_calls
from distcheck.records.posted_calls import PostedCall, Wait, why_stuck
from distcheck.worlds.local.children import Child
from distcheck.worlds.messages import Blocked, Proven, printable

# Heuristic: all reports must stay unchanged for this long, while none of the ranks runs. A
# collective that can complete on this rank does so within milliseconds. A rank that waits in C++
# appears awake here as soon as it has run, and reports that within 0.2 s if its polling thread has
# a core.
_UNCHANGED_S = 0.25

WaitsByRank = Mapping[int, Blocked]  # by rank


class ProofWatch:
    """Looks for a proof several times a second."""

    def __init__(self) -> None:
        self._counts: tuple[int, ...] = ()
        self._since = 0.0
        self._found: Proven | None = None

    def look(self, children: Sequence[Child], now: float) -> Proven | None:
        """Return the proof that the world of `children` cannot proceed; None if there is none at
        `now` (monotonic seconds).
        """
        said = {rank: c.waits for rank, c in enumerate(children) if c.waits is not None}
        if len(said) < len(children):
            self._counts = ()
            return None
        counts = tuple(child.waits_count for child in children)
        if counts != self._counts or any(child.is_awake for child in children):
            self._counts, self._since = counts, now
            self._found = prove_no_progress(said)
            return None
        known_at = min(child.known_at for child in children)
        return self._found if known_at - self._since >= _UNCHANGED_S else None


def prove_no_progress(said: WaitsByRank) -> Proven | None:
    """Return the proof that follows from the reports of all ranks; None if nothing follows."""
    if all(own.over for own in said.values()) or not all(_is_valid_report(r, said) for r in said):
        return None
    if what := _mismatch(said):
        return Proven("mismatch", printable(what))
    how, what = _deadlock(said)
    return Proven(how, printable(what)) if what else None


def _is_valid_report(rank: int, said: WaitsByRank) -> bool:
    """Return True if the report of a rank names only this rank, ranks of this world, and calls that
    it lists. A report may be invalid, because it comes from a process in which any code may run.
    """
    own = said[rank]
    named = {other for call in own.calls for other in (call.peer, call.root) if other is not None}
    named |= {other for ranks in own.ranks.values() for other in ranks}
    places = range(len(own.calls))
    return (
        named <= said.keys()
        and all(call.rank == rank for call in own.calls)
        and all(place in places for place in own.on)
    )


def _mismatch(said: WaitsByRank) -> str:
    waited = [c for own in said.values() for c in (own.calls[place] for place in own.on)]
    for call in sorted(waited, key=lambda c: (c.is_message, c.number, c.group, c.rank)):
        if call.is_message:
            if fits := _misfit(call, said):
                return fits
            continue
        ranks = _ranks_of(call, said)
        found = {rank: _call_of(said[rank], call) for rank in ranks}
        there = {rank: one for rank, one in found.items() if one is not None}
        if not ranks or any(_has_posted(said[r], call) and r not in there for r in ranks):
            continue
        calls = list(there.values())
        apart = any(posted_calls.calls_differ(a, b) for a in calls for b in calls)
        splits = call.kind == "all_to_all" and posted_calls.splits_disagree(there, ranks)
        if apart or splits:
            missing = [rank for rank in ranks if rank not in there]
            return posted_calls.call_mismatch_in_words(call.number, calls, missing)
    return ""


def _misfit(call: PostedCall, said: WaitsByRank) -> str:
    """Describe a matching send and receive that differ in size or dtype; empty if none does. They
    match by number, which counts the messages between two ranks with the same tag; this is valid
    only while no receive accepts any rank.
    """
    peer = said.get(-1 if call.peer is None else call.peer)
    receiver = call.rank if call.kind == "recv" else call.peer
    if peer is None or receiver is None or _takes_from_any(said[receiver], call):
        return ""
    for other in peer.calls:
        meets = other.is_message and other.kind != call.kind and other.peer == call.rank
        same = (other.group, other.tag, other.number) == (call.group, call.tag, call.number)
        if meets and same and (other.counts, other.dtype) != (call.counts, call.dtype):
            pair = (call, other) if call.kind == "send" else (other, call)
            return posted_calls.message_mismatch_in_words(*pair)
    return ""


def _deadlock(said: WaitsByRank) -> tuple[str, str]:
    """Return the kind of deadlock and an explanation, if no blocked rank can resume before another
    blocked rank does; else two empty strings.
    """
    stuck = {rank for rank, own in said.items() if own.on and not own.over}
    over = [rank for rank, own in said.items() if own.over]
    if len(stuck) + len(over) < len(said) or not all(own.alone for own in said.values()):
        return "", ""
    while free := {
        rank
        for rank in stuck
        for place in said[rank].on
        if _may_complete(said[rank].calls[place], said, {*stuck, *over})
    }:
        stuck -= free
    if len(stuck) + len(over) < len(said):
        return "", ""
    waits = {}
    for rank in stuck:
        call = said[rank].calls[said[rank].on[0]]
        group = said[rank].ranks.get(call.group, ())
        waits[rank] = Wait(call, list(_waited_for(call, said)), group=group)
    return why_stuck(waits, over)


def _may_complete(call: PostedCall, said: WaitsByRank, stuck: set[int]) -> bool:
    if not call.is_message and not _ranks_of(call, said):
        return True  # ranks disagree about the group, so nothing is known
    missing = list(_waited_for(call, said))
    if call.kind == "recv" and call.peer is None:
        return not missing or any(rank not in stuck for rank in missing)
    return not stuck.intersection(missing)


def _waited_for(call: PostedCall, said: WaitsByRank) -> Iterator[int]:
    """Yield the ranks that a call waits for: those that have not posted their part of it."""
    if not call.is_message:
        ranks = _ranks_of(call, said)
        yield from (rank for rank in ranks if not _has_posted(said[rank], call))
    elif call.kind == "send":
        assert call.peer is not None
        posted = _messages(said[call.peer], call, "recv", (call.rank, -1))
        if posted < call.number:
            yield call.peer
    elif call.peer is not None and not _takes_from_any(said[call.rank], call):
        if _messages(said[call.peer], call, "send", (call.rank,)) < call.number:
            yield call.peer
    else:  # messages cannot be matched to receives, but both can be counted
        own = said[call.rank]
        sent = sum(_messages(one, call, "send", (call.rank,)) for one in said.values())
        came = sum(n for group, tag, n in own.received if (group, tag) == (call.group, call.tag))
        if sent <= came:
            ranks = own.ranks.get(call.group, ()) if call.peer is None else (call.peer,)
            yield from (rank for rank in ranks if rank != call.rank)


def _messages(own: Blocked, call: PostedCall, kind: str, peers: Sequence[int]) -> int:
    """Return how many sends or receives that may match `call` a rank has posted."""
    return sum(
        count
        for group, what, peer, tag, count in own.messages
        if (group, what, tag) == (call.group, kind, call.tag) and peer in peers
    )


def _takes_from_any(own: Blocked, call: PostedCall) -> bool:
    return _messages(own, call, "recv", (-1,)) > 0


def _ranks_of(call: PostedCall, said: WaitsByRank) -> tuple[int, ...]:
    """Return the ranks of a collective's group; empty if the reports disagree about it."""
    ranks = said[call.rank].ranks.get(call.group, ())
    if not all(rank in said for rank in ranks):
        return ()
    alike = all(said[r].ranks.get(call.group) == ranks for r in ranks)
    return ranks if alike and all(call.group in said[r].posted for r in ranks) else ()


def _has_posted(own: Blocked, call: PostedCall) -> bool:
    return own.posted[call.group] >= call.number


def _call_of(own: Blocked, call: PostedCall) -> PostedCall | None:
    """Return a rank's collective with the same group and number; None if the rank no longer keeps
    it.
    """
    for other in own.calls:
        if not other.is_message and (other.group, other.number) == (call.group, call.number):
            return other
    return None
