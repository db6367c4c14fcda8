"""Groups ranks by what they did, and identifies the rank that differs from the others.

A rank is odd if most ranks behaved differently. In a tie no rank is odd, and the tie is reported. A
rank that stopped because it lost its peer is not odd: its failure is secondary.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

Key = tuple[str, bool, int]  # of a call: its group, point-to-point, its number
Calls = Mapping[int, Mapping[Key, str]]  # calls by rank, of the ranks that replied


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items with the same key, in the order of their first ones."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Format ranks as `rank 1` or `ranks 0, 2`."""
    found = sorted(ranks)
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def ranks_outside_the_majority(groups: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the ranks outside the largest group, in order; empty if two groups are the largest."""
    sizes = sorted(map(len, groups.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return []
    return sorted(r for ranks in groups.values() if len(ranks) < sizes[0] for r in ranks)


@dataclass(frozen=True)
class CallMismatch:
    """A call that differs across ranks: the calls and their ranks.

    `odd` are the ranks outside the majority, empty in a tie. `unknown` ranks did not reply, and may
    belong to any group.
    """

    number: int
    groups: dict[str, list[int]]
    odd: list[int]
    unknown: list[int]

    def in_words(self) -> str:
        """Return the sentence for the diagnosis and the picture."""
        called = [f"{ranks_in_words(ranks)} called {name}" for name, ranks in self.groups.items()]
        if self.odd:
            called.sort(key=lambda words: not words.startswith(f"{ranks_in_words(self.odd)} "))
        text = f"at call {self.number}, {' and '.join(called)}"
        if self.unknown:
            text += f", and {ranks_in_words(self.unknown)} reported no data"
        tie = len({len(ranks) for ranks in self.groups.values()}) == 1
        why = "the groups are equally large, so" if tie else "so"
        return text if self.odd else f"{text}; {why} it is unknown which is wrong"


def majority_call(groups: Mapping[str, Sequence[int]], *, unknown: int = 0) -> str:
    """Return the majority's call, or "" in a tie, even one that `unknown` ranks may create."""
    sizes = sorted(map(len, groups.values()), reverse=True)
    if len(sizes) > 1 and sizes[0] <= sizes[1] + unknown:
        return ""
    return max(groups, key=lambda name: len(groups[name]), default="")


def group_ranks_by_call(calls: Calls, key: Key) -> dict[str, list[int]]:
    return grouped([r for r in sorted(calls) if key in calls[r]], lambda rank: calls[rank][key])


def first_call_mismatch(calls: Calls) -> CallMismatch | None:
    """Return the first call that differs across ranks, other than sends and receives."""
    keys = sorted({key for own in calls.values() for key in own if not key[1]}, key=lambda k: k[2])
    for key in keys:
        groups = group_ranks_by_call(calls, key)
        if len(groups) > 1:
            unknown = sorted(rank for rank, own in calls.items() if not own)
            most = majority_call(groups, unknown=len(unknown))
            odd = sorted(r for name, ranks in groups.items() if name != most for r in ranks)
            return CallMismatch(key[2], groups, odd if most else [], unknown)
    return None


def first_unreached_call(
    calls: Calls, *, besides: Iterable[int] = ()
) -> tuple[int, list[int]] | None:
    """Return the number of the first call that some ranks did not reach, and these ranks without
    secondary failures (`besides`). Return None if all ranks made the same number of calls.
    """
    victims = set(besides)
    keys = sorted({key for own in calls.values() for key in own if not key[1]}, key=lambda k: k[2])
    for key in keys:
        behind = [
            rank
            for rank, own in calls.items()
            if own and key not in own and _is_behind(own, key) and rank not in victims
        ]
        if behind:
            return key[2], sorted(behind)
    return None


def _is_behind(own: Mapping[Key, str], key: Key) -> bool:
    same = [k[2] for k in own if k[:2] == key[:2]]
    return bool(same) and key[2] > max(same)
