"""Which of many alike parameters every run tries; the sweep tries the others, too."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def firsts(given: Sequence[T], kinds: Callable[[T], Iterable[Hashable]]) -> list[T]:
    """Those of which some kind was not there before, in their order."""
    seen: set[Hashable] = set()
    found = []
    for one in given:
        if new := set(kinds(one)) - seen:
            seen |= new
            found.append(one)
    return found
