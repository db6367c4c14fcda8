"""Explains why blocked ranks can never continue: an unmatched message, or a cycle.

Used for simulated worlds and worlds of processes: both know who waits in which call, and for whom.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distcheck.records.odd_ranks import ranks_in_words
from distcheck.records.posted_calls import Posted, message_in_words, wait_in_words

_MOST_IN_WORDS = 6  # groups of ranks with equal waits
_MOST_OF_CYCLE = 8  # ranks of a cycle in a sentence
Why = Literal["mismatch", "unmatched", "deadlock"]


@dataclass(frozen=True)
class Wait:
    """The reason why a rank is blocked: a call of a `group` of ranks, or other words; and the ranks
    that it waits for.
    """

    call: Posted | None
    missing: Sequence[int] = field(default=())
    words: str = ""
    group: Sequence[int] = field(default=())

    def in_words(self, *, with_group: bool = False) -> str:
        """Return the object of the wait, to follow "waits"."""
        if self.call is None:
            return self.words
        of = f", in the group of {ranks_in_words(self.group)}" if with_group and self.group else ""
        return f"{wait_in_words(self.call, list(self.missing))}{of}"


def why_stuck(waits: Mapping[int, Wait], over: Sequence[int]) -> tuple[Why, str]:
    """Explain a world in which every rank is blocked or finished (`over`)."""
    if said := _other_tag(waits):
        return "mismatch", said
    waiting = waiting_in_words(waits, over)
    gone = set(over)
    ended_by = [w.call for w in waits.values() if w.call and gone.intersection(w.missing)]
    if ended_by and all(call.is_message for call in ended_by):
        return "unmatched", f"{_unmatched(ended_by)}; {waiting}"
    return "deadlock", waiting


def waiting_in_words(waits: Mapping[int, Wait], over: Sequence[int]) -> str:
    """Describe all waits, the ranks of a cycle first, and those that finished (`over`)."""
    cycle = cycle_of({rank: wait.missing for rank, wait in waits.items()})
    several = len({wait.call.group for wait in waits.values() if wait.call}) > 1
    alike: dict[str, list[int]] = {}
    for rank in [*cycle, *sorted(waits.keys() - set(cycle))]:
        alike.setdefault(waits[rank].in_words(with_group=several), []).append(rank)
    said = [
        f"{ranks_in_words(ranks)} wait{'s' * (len(ranks) == 1)} {words}"
        for words, ranks in alike.items()
    ]
    more = len(said) - _MOST_IN_WORDS
    said = said[:_MOST_IN_WORDS] + ([f"{more} other groups of ranks wait"] if more > 0 else [])
    if cycle:
        said.append(_cycle_in_words(cycle))
    return "; ".join(said + ([f"{ranks_in_words(over)} finished"] if over else []))


def cycle_of(missing: Mapping[int, Sequence[int]]) -> list[int]:
    """Return ranks that each wait for the next one, the last for the first; empty if there are
    none. `missing` are the ranks that each waits for.
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


def _unmatched(calls: Sequence[Posted]) -> str:
    call = min(calls, key=lambda call: (call.rank, call.number))
    kind, other = ("receive", "send") if call.kind == "recv" else ("send", "receive")
    return f"the {kind} of rank {call.rank}{call.where} has no matching {other}"


def _other_tag(waits: Mapping[int, Wait]) -> str:
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
            return message_in_words(sent, received)
    return ""
