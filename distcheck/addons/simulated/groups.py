"""Checks that ranks agree on the process groups that they create, and that they destroy them.

torch names groups by a counter. If ranks create different groups, or create them in a different
order, one name stands for different groups.

torch keeps each group, with its threads and connections, until it is destroyed or the process
exits. Creating several groups of the same ranks at setup is normal, for example one per layer. A
group is therefore reported as leaked only if a step creates it anew: its rank has called it, and no
longer calls it after the same line has created the next group of the same ranks. A group that its
rank never calls is reported if the next one was created in a later step.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from distcheck.addons.simulated.calls import calling_stack, is_called_by_theirs
from distcheck.records.odd_ranks import grouped, ranks_in_words
from distcheck.worlds.callers import place_of_caller

NOT_DESTROYED = "groups-not-destroyed"
_FEWEST = 3  # Heuristic: two could be a remainder of setup
_MOST_NAMED = 8  # Heuristic: ranks that a message lists
_Line = tuple[
    str, tuple[int, ...]
]  # of the code under test, and the ranks of the group created there


@dataclass(eq=False)
class CreatedGroup:
    """A group that a line of the code under test created on one rank. `alike` are all groups of the
    same ranks that the line created on that rank, in order.
    """

    alike: list["CreatedGroup"]
    step: int
    called: bool = False
    called_later: bool = False  # after the next one was created
    destroyed: bool = False

    def call(self) -> None:
        self.called = True
        self.called_later |= self.alike[-1] is not self


class CreatedGroups:
    """The groups that each rank has created."""

    def __init__(self) -> None:
        self._times: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._by_name: defaultdict[tuple[str, int], dict[int, _Line]] = defaultdict(dict)
        self._by_line: defaultdict[tuple[int, _Line], list[CreatedGroup]] = defaultdict(list)
        self.steps: defaultdict[int, int] = defaultdict(int)  # current step of each rank

    def made(self, rank: int, name: str, ranks: Sequence[int]) -> CreatedGroup | None:
        """Record that a rank creates a group. A group that is created again is a new one. Return
        the record if the code under test creates the group directly, else None.
        """
        self._times[rank, name] += 1
        line = place_of_caller(), tuple(ranks)
        self._by_name[name, self._times[rank, name]][rank] = line
        if not is_called_by_theirs(calling_stack()):
            return None
        alike = self._by_line[rank, line]
        alike.append(CreatedGroup(alike, self.steps[rank]))
        return alike[-1]

    def mismatch(self) -> str:
        """Return a sentence about the first group on which ranks disagree; "" if none."""
        for made in self._by_name.values():
            alike = grouped(sorted(made), made.__getitem__)
            if len({ranks for _, ranks in alike}) > 1:
                clauses = [
                    f"{ranks_in_words(makers)} made a group of {ranks_in_words(ranks)}"
                    f"{f' at {place}' * bool(place)}"
                    for (place, ranks), makers in alike.items()
                ]
                return f"{' and '.join(clauses)}, which torch treats as the same group"
        return ""

    def not_destroyed(self) -> Iterator[str]:
        """Yield a sentence for each line whose groups are never destroyed."""
        leaks: defaultdict[_Line, dict[int, int]] = defaultdict(dict)
        for (rank, line), groups in self._by_line.items():
            kept = [group for group in groups if not group.destroyed]
            left = [
                group
                for group, following in pairwise(kept)
                if (not group.called_later if group.called else following.step > group.step)
            ]
            if len(left) + 1 >= _FEWEST:
                leaks[line][rank] = len(kept)
        for (place, ranks), counts in leaks.items():
            yield (
                f"{_format_ranks(counts)} made {max(counts.values())} groups of "
                f"{_format_ranks(ranks)} at {place}, one after the other, and never destroyed "
                "them, so torch keeps each with its connections: create the group once, or call "
                "destroy_process_group(group)"
            )


def _format_ranks(ranks: Collection[int]) -> str:
    return ranks_in_words(ranks) if len(ranks) <= _MOST_NAMED else f"{len(ranks)} ranks"
