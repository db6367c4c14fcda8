"""Which schedules a search runs, in rounds: drawn from seeds, or all with few switches."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from distcheck.records.schedules import KINDS, Covered, Schedule, ScheduleRun, read_schedule

TURNS = 400  # of one run that are kept
NOT_SEEN = ("hung", "killed")  # ended by a clock or from outside, which accuses no one
_FIRST_ROUND, _LAST_ROUND = 4 * len(KINDS), 32 * len(KINDS)  # schedules; chosen


def drawn(schedules: int) -> Iterator[list[Schedule]]:
    """Those of seeds, few at first: what most schedules show is found soon."""
    first, size = 1, _FIRST_ROUND
    while first <= schedules:
        seeds = range(first, min(first + size, schedules + 1))
        yield [read_schedule(str(seed)) for seed in seeds]
        first, size = first + size, min(2 * size, _LAST_ROUND)


class Tree:
    """Every schedule with at most `most` switches, those with the fewest first. A switch is a
    choice that is not the usual one, as a delay is of delay-bounded scheduling (Emmi, Qadeer and
    Rakamaric, 2011); that few of them find most bugs is what CHESS showed of preemptions (Musuvathi
    and Qadeer, Iterative Context Bounding, 2007). Where there are sends, each schedule is run with
    buffered ones, too.
    """

    def __init__(self, usual: ScheduleRun, most: int) -> None:
        sends = any(turn.call.startswith("send") for turn in usual.turns)
        self._buffers = sends or len(usual.turns) >= TURNS  # no more are known
        self._most, self._level = most, 0
        self._runs: list[ScheduleRun] = []  # of this level, less what the next one does not need
        self.covered = Covered(most=most, switches=-1, buffered=self._buffers)
        self.enter([usual])

    def rounds(self, limit: int) -> Iterator[list[Schedule]]:
        """At most `limit` schedules, in rounds; the runs of each go to `enter` before the next one
        is asked for.
        """
        if self._buffers:
            if limit < 1:
                return
            yield [Schedule(buffered=True)]
            limit -= 1
        self.covered = msgspec.structs.replace(self.covered, switches=0)
        for level in range(1, self._most + 1):
            self._level = level
            parents, self._runs = self._runs, []
            following, ran, size = self._children(parents), 0, _FIRST_ROUND
            while batch := list(islice(following, min(size, limit))):
                yield batch
                ran, limit, size = ran + len(batch), limit - len(batch), min(2 * size, _LAST_ROUND)
            # A run with more choices than are known has schedules below it that are not known.
            known = not any(run.cut or run.end in NOT_SEEN for run in parents)
            if not known or next(following, None) is not None:
                self.covered = msgspec.structs.replace(self.covered, further=ran)
                return
            self.covered = msgspec.structs.replace(self.covered, switches=level, all=not ran)
            if not ran:
                return

    def enter(self, runs: Sequence[ScheduleRun]) -> None:
        """Notes runs, whose choices the next level needs."""
        if self._level < self._most:
            self._runs += [msgspec.structs.replace(run, results=(), turns=()) for run in runs]

    @staticmethod
    def _children(parents: Sequence[ScheduleRun]) -> Iterator[Schedule]:
        """With one switch more, at a later choice than the last: so each comes once."""
        for parent in parents:
            begun = read_schedule(parent.schedule)
            last = max((place for place, _ in begun.switches), default=0)
            for place, choice in enumerate(parent.choices[last:], last + 1):
                for rank in choice.others:
                    switches = (*begun.switches, (place, rank))
                    yield msgspec.structs.replace(begun, switches=switches)
