"""Calls of ranks, in simulated worlds and in worlds of processes. Finds calls that do not match,
and the reason that blocked ranks can never continue (an unmatched message, or a cycle).

Collectives of a group with the same number must be the same on all of its ranks. A property is
compared only if it is known for both calls.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from distcheck.records.odd_ranks import (
    grouped,
    majority_call,
    ranks_in_words,
    ranks_outside_the_majority,
)

_MOST_SITES = 4  # of one kind of call, in a sentence
_REDUCES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter")
_HAVE_ROOT = ("broadcast", "reduce", "gather", "scatter")
Sizes = Sequence[Sequence[int]]  # the shapes of several tensors


@dataclass(eq=False, kw_only=True)
class PostedCall:
    """One operation posted by one rank. `root` and `peer` are ranks of the world.

    kind    operation; must be the same on all ranks of the group
    name    name of the called function
    counts  numbers of elements that must be the same on all ranks
    known   False if only kind and sizes are known, and not the reduce operation and the root, as
            for calls that bypass Python
    place   calling line of the code under test, as FILE:LINE
    """

    kind: str
    name: str
    rank: int
    group: str
    number: int
    op: str = ""
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    in_splits: tuple[int, ...] = ()
    out_splits: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    dtype: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    known: bool = True
    place: str = ""

    @property
    def shapes(self) -> str:
        """Return the shapes of the call's tensors: "64x3, scalar"."""
        return ", ".join("x".join(map(str, size)) or "scalar" for size in self.sizes)

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")

    @property
    def where(self) -> str:
        """Return the call's source line as " at FILE:LINE", or ""."""
        return f" at {self.place}" if self.place else ""

    def signature(self) -> dict[str, Any]:
        """Return the known properties that must be the same on every rank of the group."""
        found: dict[str, Any] = {"operation": self.kind}
        if self.known:
            found |= {"reduce operation": self.op, "root": self.root}
        found |= {"dtype": self.dtype, "number of elements": self.counts}
        return found | {"tag": self.tag} if self.is_message else found

    def in_words(self) -> str:
        """Return the call as source code: "all_reduce(SUM) of [64x3] float32"."""
        said = [self.op] if self.op else []
        said += [f"root {self.root}"] if self.root is not None else []
        if self.is_message:
            peer = "any rank" if self.peer is None else f"rank {self.peer}"
            said += [f"{'to' if self.kind == 'send' else 'from'} {peer}"]
            said += [f"tag {self.tag}"] if self.tag else []
        asked = f"({', '.join(said)})" if said else ""
        sized = f" of [{self.shapes}] {self.dtype}".rstrip() if self.sizes else ""
        return f"{self.name}{asked}{sized}"


def is_reduction(kind: str) -> bool:
    return kind in _REDUCES


def has_root(kind: str) -> bool:
    return kind in _HAVE_ROOT


def call_timeout_s(options: Any) -> float:
    """Return the timeout of a call in seconds, from torch's options for the call, or 0 for none."""
    limit = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
    return max(0.0, limit.total_seconds()) if isinstance(limit, timedelta) else 0.0


def counts_that_must_match(kind: str, given: Sizes, got: Sizes) -> tuple[int, ...]:
    """Return the numbers of elements that must be the same on all ranks: of each rank's input, or
    of its output if a root sends. The chunks of a reduce_scatter may be a list or one tensor.
    """
    if kind == "all_to_all":
        return ()
    found = tuple(math.prod(size) for size in (got if kind == "scatter" else given))
    return (sum(found),) if kind == "reduce_scatter" else found


def all_to_all_splits(
    name: str, rows: Sequence[Sequence[int]], given: Sizes, got: Sizes, world: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of elements that an all_to_all sends to and receives from each rank; empty
    if unknown. `rows` are the numbers of rows sent to and received from each rank, if its tensors
    have one row block per rank; if empty, all blocks are equal.
    """
    both = []
    for sizes, own in zip((given, got), rows or ((), ()), strict=True):
        if len(sizes) == world and name == "all_to_all":
            both.append(tuple(math.prod(size) for size in sizes))
        elif len(sizes) == 1 and sizes[0] and world:
            first, row = sizes[0][0], math.prod(sizes[0][1:])
            both.append(tuple(count * row for count in own or (first // world,) * world))
    return (both[0], both[1]) if len(both) == 2 else ((), ())


def calls_differ(one: PostedCall, other: PostedCall) -> bool:
    """Return True if calls that must be the same differ in a property known for both."""
    return bool(_differing_keys(one.signature(), other.signature()))


def splits_disagree(calls: Mapping[int, PostedCall], ranks: Sequence[int]) -> bool:
    """Return True if two ranks disagree on what an all_to_all sends between them."""
    whole = {
        rank: call
        for rank, call in calls.items()
        if call.known and len(call.in_splits) == len(call.out_splits) == len(ranks)
    }
    places = {rank: place for place, rank in enumerate(ranks)}
    return any(
        one.in_splits[places[other]] != received.out_splits[places[rank]]
        for rank, one in whole.items()
        for other, received in whole.items()
    )


def call_mismatch_in_words(
    number: int, calls: Sequence[PostedCall], missing: Sequence[int], unknown: Sequence[int] = ()
) -> str:
    """Describe inconsistent calls with one number: calls, ranks, source lines, differing
    properties, and the odd rank. `missing` ranks did not reach the call; those of `unknown` ranks
    are not known.
    """
    groups = _group_by_text(sorted(calls, key=lambda call: call.rank))
    said = calls_in_words(calls)
    absent = f"; {ranks_in_words(missing)} did not make it" if missing else ""
    absent += f"; {ranks_in_words(unknown)} reported no data" if unknown else ""
    odd = _describe_odd_ranks(groups, unknown=len(unknown))
    return f"at call {number}, {said}: {differing_properties(calls)}{absent}; {odd}"


def calls_in_words(calls: Sequence[PostedCall]) -> str:
    """Format calls by ranks: "ranks 0, 1 called ... and rank 2 called ..."."""
    return " and ".join(_describe_groups(_group_by_text(sorted(calls, key=lambda call: call.rank))))


def message_mismatch_in_words(sent: PostedCall, received: PostedCall) -> str:
    """Describe a send and a receive that match but are inconsistent."""
    return (
        f"rank {sent.rank} called {sent.in_words()}{sent.where}, and rank {received.rank} "
        f"called {received.in_words()}{received.where}: {differing_properties([sent, received])}"
    )


def differing_properties(calls: Sequence[PostedCall]) -> str:
    found = [call.signature() for call in calls]
    names = list(
        dict.fromkeys(n for one in found for other in found for n in _differing_keys(one, other))
    )
    if calls[0].is_message:
        names = [name for name in names if name != "operation"]
    elif "operation" in names:
        names = ["operation"]
    if not names and calls[0].kind == "all_to_all":
        names = ["split sizes"]
    return f"they differ in the {' and the '.join(names)}"


def wait_in_words(call: PostedCall, missing: Sequence[int]) -> str:
    """Describe the call that blocks a rank, and the ranks that it waits for."""
    ranks = ranks_in_words(missing) if missing else "a call that does not match"
    if call.kind == "recv" and call.peer is None:
        ranks = "any rank"
    return f"in {call.in_words()}, number {call.number}{call.where}, for {ranks}"


def _differing_keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]


def _group_by_text(calls: Sequence[PostedCall]) -> dict[str, list[PostedCall]]:
    """Group calls by their text; a partially known call joins a group that it may belong to."""
    groups: dict[str, list[PostedCall]] = {}
    for call in sorted(calls, key=lambda call: not call.known):
        words = f"{call.in_words()}{_splits(call)}"
        if not call.known and words not in groups:
            fits = (name for name, own in groups.items() if not calls_differ(own[0], call))
            words = next(fits, words)
        groups.setdefault(words, []).append(call)
    return groups


def _splits(call: PostedCall) -> str:
    if call.kind != "all_to_all" or not call.known:
        return ""
    return f" (sends {list(call.in_splits)}, receives {list(call.out_splits)} elements)"


def _describe_groups(groups: Mapping[str, Sequence[PostedCall]]) -> Iterator[str]:
    for words, calls in groups.items():
        sites = list(dict.fromkeys(call.where for call in calls))[:_MOST_SITES]
        at = " and".join(filter(None, sites))
        yield f"{ranks_in_words([call.rank for call in calls])} called {words}{at}"


def _describe_odd_ranks(groups: Mapping[str, Sequence[PostedCall]], *, unknown: int) -> str:
    ranks = {words: [call.rank for call in calls] for words, calls in groups.items()}
    if unknown and not majority_call(ranks, unknown=unknown):
        return "so it is unknown which is wrong"
    odd = ranks_outside_the_majority(ranks)
    if not odd:
        return "the groups are equally large, so it is unknown which is wrong"
    return f"most ranks agree, and {ranks_in_words(odd)} made a different call"


_MOST_IN_WORDS = 6  # groups of ranks with equal waits
_MOST_OF_CYCLE = 8  # ranks of a cycle in a sentence
Why = Literal["mismatch", "unmatched", "deadlock"]


@dataclass(frozen=True)
class Wait:
    """The call of a `group`, or text, that blocks a rank, and the ranks that it waits for."""

    call: PostedCall | None
    missing: Sequence[int] = field(default=())
    words: str = ""
    group: Sequence[int] = field(default=())

    def in_words(self, *, with_group: bool = False) -> str:
        """Return the text that follows "waits"."""
        if self.call is None:
            return self.words
        of = f", in the group of {ranks_in_words(self.group)}" if with_group and self.group else ""
        return f"{wait_in_words(self.call, list(self.missing))}{of}"


def why_stuck(waits: Mapping[int, Wait], over: Sequence[int]) -> tuple[Why, str]:
    """Explain a world in which every rank is blocked (`waits`) or finished (`over`)."""
    if said := _describe_tag_mismatch(waits):
        return "mismatch", said
    waiting = waiting_in_words(waits, over)
    gone = set(over)
    ended_by = [w.call for w in waits.values() if w.call and gone.intersection(w.missing)]
    if ended_by and all(call.is_message for call in ended_by):
        return "unmatched", f"{_describe_unmatched(ended_by)}; {waiting}"
    return "deadlock", waiting


def waiting_in_words(waits: Mapping[int, Wait], over: Sequence[int]) -> str:
    """Describe all waits, ranks of a cycle first, and the ranks that finished (`over`)."""
    cycle = find_wait_cycle({rank: wait.missing for rank, wait in waits.items()})
    several = len({wait.call.group for wait in waits.values() if wait.call}) > 1
    ranks = [*cycle, *sorted(waits.keys() - set(cycle))]
    alike = grouped(ranks, lambda rank: waits[rank].in_words(with_group=several))
    said = [
        f"{ranks_in_words(ranks)} wait{'s' * (len(ranks) == 1)} {words}"
        for words, ranks in alike.items()
    ]
    more = len(said) - _MOST_IN_WORDS
    said = said[:_MOST_IN_WORDS] + ([f"{more} other groups of ranks wait"] if more > 0 else [])
    if cycle:
        said.append(_cycle_in_words(cycle))
    return "; ".join(said + ([f"{ranks_in_words(over)} finished"] if over else []))


def find_wait_cycle(missing: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a cycle of ranks: each waits for the next, and the last waits for the first. Return an
    empty list if there is no cycle. `missing` are the ranks that each rank waits for.
    """
    known: set[int] = set()
    for first in sorted(missing):
        path: dict[int, int] = {}
        rank: int | None = first
        while rank is not None and rank not in known and rank not in path:
            path[rank] = len(path)
            rank = next((other for other in missing[rank] if other in missing), None)
        if rank is not None and rank in path:
            return list(path)[path[rank] :]
        known.update(path)
    return []


def _cycle_in_words(cycle: Sequence[int]) -> str:
    if len(cycle) == 1:
        return f"so rank {cycle[0]} waits for itself"
    pairs = [
        f"rank {rank} waits for rank {following}"
        for rank, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    more = len(pairs) - _MOST_OF_CYCLE
    if more > 0:
        pairs[_MOST_OF_CYCLE - 1 : -1] = [f"and so on over {more} more ranks"]
    return f"so they wait in a cycle: {', '.join(pairs)}"


def _describe_unmatched(calls: Sequence[PostedCall]) -> str:
    call = min(calls, key=lambda call: (call.rank, call.number))
    kind, other = ("receive", "send") if call.kind == "recv" else ("send", "receive")
    return f"the {kind} of rank {call.rank}{call.where} has no matching {other}"


def _describe_tag_mismatch(waits: Mapping[int, Wait]) -> str:
    """Describe a send and a receive that wait for each other and differ only in the tag."""
    for sent in (wait.call for wait in waits.values()):
        if sent is None or sent.kind != "send" or sent.peer is None or sent.peer not in waits:
            continue
        received = waits[sent.peer].call
        if (
            received is not None
            and received.kind == "recv"
            and received.peer == sent.rank
            and received.group == sent.group
            and received.tag != sent.tag
        ):
            return message_mismatch_in_words(sent, received)
    return ""
