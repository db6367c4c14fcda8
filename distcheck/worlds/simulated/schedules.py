"""Which rank runs next, where more than one could: as a schedule says.

round-robin  after every call, or every few, the next rank by number
random       half of the choices are the usual ones, the others any rank's with the same chance
PCT          ranks have priorities in an order that is drawn, and the highest that can run does; at
             three choices, drawn too, the one that would run gets the lowest (Burckhardt and
             others, A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, 2010)
"""

import random
from collections.abc import Sequence

from distcheck.records.schedules import KINDS, Choice, Schedule

_CHANGES, _AMONG = 3, 128  # of PCT: changes of priority, among so many choices; chosen
_ASKS_EARLY = 0.5  # of the times that a rank asks whether something is there; chosen
_MOST_QUANTUM = 4  # calls between two turns of round-robin; chosen


class Chooser:
    """Makes the choices of one run; `switches` are those that were not the usual ones. The first
    `keeps` are noted in `choices`; `cut` says that there were more.
    """

    def __init__(self, schedule: Schedule, size: int, *, keeps: int = 0) -> None:
        self._keeps = keeps
        self.choices: list[Choice] = []
        self.cut = False
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._told = dict(schedule.switches)
        self._priority = list(range(size))
        self._random.shuffle(self._priority)
        self._changes = set(self._random.sample(range(1, _AMONG + 1), _CHANGES))
        self._quantum = 1 + schedule.seed // (2 * len(KINDS)) % _MOST_QUANTUM
        self._choices = 0
        self.switches: list[tuple[int, int]] = []

    def choose(self, usual: int, ranks: Sequence[int], asking: int | None = None) -> int:
        """The rank that runs next, of `ranks`, which are those that can; `usual` is one of them.
        A rank that was `asking` whether something is there is the last of them. In half of the
        cases it goes on, as if it had asked before the others ran; otherwise it gets the lowest
        priority, since it may ask again until another one has run.
        """
        if len(ranks) < 2:
            return usual
        self._choices += 1
        if len(self.choices) < self._keeps:
            others = tuple(rank for rank in ranks if rank != usual)
            self.choices.append(Choice(usual, others))
        else:
            self.cut = self._keeps > 0
        if asking is None or not self._schedule.seed:
            chosen = self._draw(usual, ranks)
        elif self._random.random() < _ASKS_EARLY:
            chosen = asking
        else:
            self._priority[asking] = min(self._priority) - 1
            chosen = self._draw(usual, [rank for rank in ranks if rank != asking])
        if chosen != usual:
            self.switches.append((self._choices, chosen))
        return chosen

    def _draw(self, usual: int, ranks: Sequence[int]) -> int:
        if not self._schedule.seed:
            told = self._told.get(self._choices, usual)
            return told if told in ranks else usual
        if self._schedule.kind == "random":
            return usual if self._random.random() < 0.5 else self._random.choice(ranks)
        if self._schedule.kind == "round-robin":
            if self._choices % self._quantum:
                return usual
            return min(ranks, key=lambda rank: ((rank - usual - 1) % len(self._priority), rank))
        first = max(ranks, key=self._priority.__getitem__)
        if self._choices in self._changes:
            self._priority[first] = min(self._priority) - 1
            first = max(ranks, key=self._priority.__getitem__)
        return first
