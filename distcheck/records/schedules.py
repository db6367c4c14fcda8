"""Schedules of a simulated world: in which order its ranks run, as text that replays one.

    17                  drawn from this seed
    3:1,7:0             the usual order, but at choice 3 rank 1 runs next, and at choice 7 rank 0
    buffered            the usual order, and a send is complete as soon as it is posted
    buffered,3:1        both

A choice is a point at which more than one rank could run: they are numbered from 1. The usual order
is the empty text: a rank runs until it waits, then the one that has been ready longest.
"""

import msgspec

from distcheck.errors import UsageError

BUFFERED = "buffered"
KINDS = ("round-robin", "random", "PCT")  # of a seed, by its remainder
_MOST_SEED = 10**12


class Schedule(msgspec.Struct, frozen=True):
    """A schedule, read: drawn from `seed` if it has one, and otherwise by `preemptions`, each the
    number of a choice and a rank.
    """

    seed: int = 0
    buffered: bool = False
    preemptions: tuple[tuple[int, int], ...] = ()

    @property
    def kind(self) -> str:
        """How its choices are made."""
        return KINDS[self.seed % len(KINDS)] if self.seed else "usual"

    def __str__(self) -> str:
        if self.seed:
            return str(self.seed)
        words = [BUFFERED] if self.buffered else []
        return ",".join([*words, *(f"{choice}:{rank}" for choice, rank in self.preemptions)])


def read_schedule(text: str) -> Schedule:
    """A schedule from its text. Raises UsageError. Every other group of seeds buffers sends."""
    if text.isascii() and text.isdecimal():
        if not 1 <= int(text) <= _MOST_SEED:
            raise UsageError(f"--schedule {text} is out of range; a seed is 1 to {_MOST_SEED}")
        return Schedule(seed=int(text), buffered=int(text) // len(KINDS) % 2 == 1)
    words = text.split(",") if text else []
    buffered = words[:1] == [BUFFERED]
    preemptions = []
    for word in words[buffered:]:
        choice, colon, rank = word.partition(":")
        if not colon or not all(_is_number(one) for one in (choice, rank)):
            raise UsageError(
                f"--schedule {text!r} is not a schedule; give a seed, or what a report has printed"
            )
        preemptions.append((int(choice), int(rank)))
    return Schedule(buffered=buffered, preemptions=tuple(preemptions))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 9


class Turn(msgspec.Struct, frozen=True):
    """A call that a rank posted, in the order in which all were posted; `switched` if the schedule
    had this rank run in place of another. `took` is whose message it took, if it is a receive from
    any rank.
    """

    rank: int
    call: str
    where: str = ""
    switched: bool = False
    took: str = ""


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """A choice of a run: the rank that runs next in the usual order, and the others that could."""

    usual: int
    others: tuple[int, ...]


class ScheduleRun(msgspec.Struct, frozen=True):
    """What a world came to under one schedule. `end` is "finished", or how it did not: "deadlock",
    "mismatch", "raised", "hung", ...; `what` says it. `results` are the ranks', in their job's own
    form. `preemptions` are the choices that were not the usual ones. `choices` are all, where they
    were asked for; `cut` says that there were more than are kept.
    """

    schedule: str
    end: str
    what: str = ""
    results: tuple[bytes, ...] = ()
    preemptions: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()
    imported: tuple[str, ...] = ()  # modules that all runs need, and none of the code under test
    choices: tuple[Choice, ...] = ()
    cut: bool = False

    @property
    def came_to(self) -> tuple[str, tuple[bytes, ...]]:
        """What must be alike under every schedule."""
        return self.end, self.results if self.end == "finished" else ()


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """How far a search came that runs every schedule with at most `most` switches, those with the
    fewest first. All with at most `preemptions` were run (-1: not even those), and `further` of
    those with one more; `all` says that no schedule has more. `buffered` says whether each was run
    with sends of both kinds, as it is where there are sends.
    """

    most: int
    preemptions: int
    further: int = 0
    all: bool = False
    buffered: bool = False


class Searched(msgspec.Struct, frozen=True):
    """What a search of schedules found: the `usual` schedule, the same `again`, how many were run,
    and of one that came to something else, the one with the fewest switches. `buffered` is the
    usual order with sends that are buffered, where it was run.
    """

    usual: ScheduleRun
    again: ScheduleRun
    ran: int = 0
    distinct: int = 0
    late: tuple[str, ...] = ()  # schedules that did not come to an end
    drawn: str = ""  # the schedule that was found first
    other: ScheduleRun | None = None
    shrinking: int = 0  # runs that it took
    repeats: bool = True  # whether the other one came to the same whenever it was run again
    buffered: ScheduleRun | None = None
    covered: Covered | None = None  # where schedules were not drawn
