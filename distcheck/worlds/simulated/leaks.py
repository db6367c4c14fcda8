"""Groups that code makes again and again and never destroys: torch keeps each of them, with its
threads and connections, until the process ends.

Several groups of the same ranks that are made at set-up are usual, and so is one for each layer. So
a group counts only if its rank has called it, and calls it no more once the same line has made the
next one of the same ranks: then a step has made it anew. One that its rank never calls counts if
the next one was made in a later step.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from distcheck.records.odd_ranks import ranks_in_words

NAME = "groups-not-destroyed"
_FEWEST = 3  # made anew after the last one was of use: two could be a rest of setting up; chosen

_MOST_NAMED = 8  # ranks; chosen


@dataclass(eq=False)
class MadeGroup:
    """A group that a line of the code under test has made on one rank; `alike` are those that it
    has made there of the same ranks, in order.
    """

    alike: list["MadeGroup"]
    step: int
    called: bool = False
    called_later: bool = False  # since the next one was made
    destroyed: bool = False

    def call(self) -> None:
        """Notes that its rank calls something in it."""
        self.called = True
        self.called_later |= self.alike[-1] is not self


class GroupsKept:
    """The groups that each rank has made."""

    def __init__(self) -> None:
        self._made: defaultdict[tuple[int, str, tuple[int, ...]], list[MadeGroup]]
        self._made = defaultdict(list)
        self.steps: defaultdict[int, int] = defaultdict(int)  # that each rank is in

    def made(self, rank: int, place: str, ranks: tuple[int, ...]) -> MadeGroup:
        """A rank makes a group."""
        alike = self._made[rank, place, ranks]
        alike.append(MadeGroup(alike, self.steps[rank]))
        return alike[-1]

    def in_words(self) -> Iterator[str]:
        """What was made and never destroyed, a sentence for each line."""
        leaks: defaultdict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
        for (rank, place, ranks), groups in self._made.items():
            kept = [group for group in groups if not group.destroyed]
            left = [
                group
                for group, following in pairwise(kept)
                if (not group.called_later if group.called else following.step > group.step)
            ]
            if len(left) + 1 >= _FEWEST:
                leaks[place, ranks][rank] = len(kept)
        for (place, ranks), counts in leaks.items():
            yield (
                f"{_in_words(counts)} made {max(counts.values())} groups of {_in_words(ranks)} at "
                f"{place}, one after the other, and never destroyed them, so that torch keeps each "
                "with its connections: make it once, or call destroy_process_group(group)"
            )


def _in_words(ranks: Collection[int]) -> str:
    return ranks_in_words(ranks) if len(ranks) <= _MOST_NAMED else f"{len(ranks)} ranks"
