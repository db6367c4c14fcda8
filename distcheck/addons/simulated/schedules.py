"""Chooses the next rank if several are ready, and generates the schedules that a search tries.

round-robin  after every call, or every few calls, the next rank by number runs
random       half of the choices are the default ones, the others are uniformly random
PCT          ranks have random priorities, and the ready rank with the highest runs; at three
   random choices, that rank gets the lowest priority (Burckhardt et al.,
   A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, 2010)
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from distcheck.records.schedules import (
    KINDS,
    Schedule,
    ScheduleChoice,
    ScheduleRun,
    SearchCoverage,
    parse_schedule,
)

TURNS = 400  # of one run that are kept
NOT_SEEN = ("hung", "killed")  # ended by a clock or from outside, which proves nothing
_FIRST_ROUND, _LAST_ROUND = 4 * len(KINDS), 32 * len(KINDS)  # Heuristic: schedules
_CHANGES, _AMONG = 3, 128  # Heuristic: PCT's priority changes, among so many choices
_ASKS_EARLY = 0.5  # Heuristic: share of polls that return before other ranks run
_MOST_QUANTUM = 4  # Heuristic: calls between two preemptions of round-robin


class SchedulePolicy:
    """Chooses the next rank throughout one run. `preemptions` records the choices that differ from
    the default. The first `keeps` choices are recorded in `choices`; `cut` is True if there were
    more.
    """

    def __init__(self, schedule: Schedule, size: int, *, keeps: int = 0) -> None:
        self._keeps = keeps
        self.choices: list[ScheduleChoice] = []
        self.cut = False
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self._set_choices = dict(schedule.preemptions)
        self._priority = list(range(size))
        self._random.shuffle(self._priority)
        self._changes = set(self._random.sample(range(1, _AMONG + 1), _CHANGES))
        self._quantum = 1 + schedule.seed // (2 * len(KINDS)) % _MOST_QUANTUM
        self._choices = 0
        self.preemptions: list[tuple[int, int]] = []

    def choose(self, usual: int, ranks: Sequence[int], asking: int | None = None) -> int:
        """Return the next rank, one of the ready `ranks`; `usual` is the default choice.

        A polling rank (`asking`) is the last of `ranks`. In half of the cases it continues, as if
        it had polled before the others ran. Otherwise it gets the lowest priority, because it may
        poll until another rank has run.
        """
        if len(ranks) < 2:
            return usual
        self._choices += 1
        if len(self.choices) < self._keeps:
            others = tuple(rank for rank in ranks if rank != usual)
            self.choices.append(ScheduleChoice(usual, others))
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
            self.preemptions.append((self._choices, chosen))
        return chosen

    def _draw(self, usual: int, ranks: Sequence[int]) -> int:
        if not self._schedule.seed:
            chosen = self._set_choices.get(self._choices, usual)
            return chosen if chosen in ranks else usual
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


def random_schedules(schedules: int) -> Iterator[list[Schedule]]:
    """Yield rounds of schedules with different seeds. Early rounds are small, because most
    differences are found early.
    """
    first, size = 1, _FIRST_ROUND
    while first <= schedules:
        seeds = range(first, min(first + size, schedules + 1))
        yield [parse_schedule(str(seed)) for seed in seeds]
        first, size = first + size, min(2 * size, _LAST_ROUND)


class ScheduleTree:
    """Enumerates the schedules with at most `most` preemptions, those with the fewest first.

    A preemption is any choice other than the default, as in delay-bounded scheduling (Emmi, Qadeer
    and Rakamaric, 2011). CHESS showed that few preemptions find most bugs (Musuvathi and Qadeer,
    Iterative Context Bounding, 2007). If there are sends, each schedule also runs with buffered
    sends.
    """

    def __init__(self, usual: ScheduleRun, most: int) -> None:
        sends = any(turn.call.startswith("send") for turn in usual.turns)
        self._buffers = sends or len(usual.turns) >= TURNS  # later turns are not recorded
        self._most, self._level = most, 0
        self._runs: list[ScheduleRun] = []  # of this level, without fields unused by the next
        self.covered = SearchCoverage(most=most, preemptions=-1, buffered=self._buffers)
        self.enter([usual])

    def rounds(self, limit: int) -> Iterator[list[Schedule]]:
        """Yield at most `limit` schedules, in rounds. The caller passes the runs of each round to
        `enter`.
        """
        if self._buffers:
            if limit < 1:
                return
            yield [Schedule(buffered=True)]
            limit -= 1
        self.covered = msgspec.structs.replace(self.covered, preemptions=0)
        for level in range(1, self._most + 1):
            self._level = level
            parents, self._runs = self._runs, []
            following, ran, size = self._children(parents), 0, _FIRST_ROUND
            while batch := list(islice(following, min(size, limit))):
                yield batch
                ran, limit, size = ran + len(batch), limit - len(batch), min(2 * size, _LAST_ROUND)
            # A run with more choices than recorded has unknown schedules below it.
            known = not any(run.cut or run.end in NOT_SEEN for run in parents)
            if not known or next(following, None) is not None:
                self.covered = msgspec.structs.replace(self.covered, further=ran)
                return
            self.covered = msgspec.structs.replace(self.covered, preemptions=level, all=not ran)
            if not ran:
                return

    def enter(self, runs: Sequence[ScheduleRun]) -> None:
        """Add finished runs. The next level is built from their choices."""
        if self._level < self._most:
            self._runs += [msgspec.structs.replace(run, results=(), turns=()) for run in runs]

    @staticmethod
    def _children(parents: Sequence[ScheduleRun]) -> Iterator[Schedule]:
        """Yield schedules with one more preemption, placed after the last one, so that each
        schedule occurs once.
        """
        for parent in parents:
            begun = parse_schedule(parent.schedule)
            last = max((place for place, _ in begun.preemptions), default=0)
            for place, choice in enumerate(parent.choices[last:], last + 1):
                for rank in choice.others:
                    preemptions = (*begun.preemptions, (place, rank))
                    yield msgspec.structs.replace(begun, preemptions=preemptions)
