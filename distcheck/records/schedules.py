"""Schedules of a simulated world: the interleaving of its ranks, as text that replays it.

    17                  drawn from this seed
    3:1,7:0             the usual order, but at choice 3 rank 1 runs next, and at choice 7 rank 0
    buffered            the usual order, and a send completes when it is posted
    buffered,3:1        both

A choice is a point at which more than one rank can run. Choices are numbered from 1. The usual
order is the empty text: a rank runs until it blocks, then the rank that has been ready longest
runs.
"""

import msgspec

from distcheck.errors import UsageError

BUFFERED = "buffered"
KINDS = ("round-robin", "random", "PCT")  # of a seed, by its remainder
_MOST_SEED = 10**12


class Schedule(msgspec.Struct, frozen=True):
    """A parsed schedule, drawn from `seed` if nonzero. Otherwise `preemptions` lists the number of
    each unusual choice with the rank that runs next.
    """

    seed: int = 0
    buffered: bool = False
    preemptions: tuple[tuple[int, int], ...] = ()

    @property
    def kind(self) -> str:
        """Return the policy of the schedule's choices."""
        return KINDS[self.seed % len(KINDS)] if self.seed else "usual"

    def __str__(self) -> str:
        if self.seed:
            return str(self.seed)
        words = [BUFFERED] if self.buffered else []
        return ",".join([*words, *(f"{choice}:{rank}" for choice, rank in self.preemptions)])


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule. Raises UsageError. Half of the seeds also buffer sends."""
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
                f"--schedule {text!r} is not a schedule; pass a seed, or a schedule from a report"
            )
        preemptions.append((int(choice), int(rank)))
    return Schedule(buffered=buffered, preemptions=tuple(preemptions))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 9


class PostedTurn(msgspec.Struct, frozen=True):
    """A call posted by a rank, in global order.

    `switched` is True if the schedule preempted a different rank for this call. `took` is the
    source of a message that was received from any rank.
    """

    rank: int
    call: str
    where: str = ""
    switched: bool = False
    took: str = ""


class ScheduleChoice(msgspec.Struct, frozen=True, array_like=True):
    """A choice of a run: the rank that runs next in the usual order, and the other ready ranks."""

    usual: int
    others: tuple[int, ...]


class ScheduleRun(msgspec.Struct, frozen=True):
    """The result of a world under one schedule.

    end          "finished", "deadlock", "mismatch", "raised", "hung", ...; `what` describes it
    results      results of the ranks, in the format of their job
    preemptions  the unusual choices
    choices      all choices, if requested; `cut`: True if there were more than are kept
    """

    schedule: str
    end: str
    what: str = ""
    results: tuple[bytes, ...] = ()
    preemptions: tuple[tuple[int, int], ...] = ()
    turns: tuple[PostedTurn, ...] = ()
    imported: tuple[str, ...] = ()  # modules needed by all runs, none of the code under test
    choices: tuple[ScheduleChoice, ...] = ()
    cut: bool = False

    @property
    def came_to(self) -> tuple[str, tuple[bytes, ...]]:
        """Return the part of the result that must be the same under every schedule."""
        return self.end, self.results if self.end == "finished" else ()


class SearchCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """Coverage of a search over all schedules with at most `most` preemptions, fewest first.

    All schedules with up to `preemptions` ran (-1: none), and `further` with one more. `all`: no
    schedule has more. `buffered`: each ran with both kinds of sends.
    """

    most: int
    preemptions: int
    further: int = 0
    all: bool = False
    buffered: bool = False


class ScheduleSearchResult(msgspec.Struct, frozen=True):
    """Result of a search over schedules: the `usual` schedule, its repetition (`again`), the number
    of schedules run, a differing one with the fewest preemptions (`other`), and the usual order
    with `buffered` sends, if run.
    """

    usual: ScheduleRun
    again: ScheduleRun
    ran: int = 0
    distinct: int = 0
    late: tuple[str, ...] = ()  # schedules that did not complete
    drawn: str = ""  # the schedule that was found first
    other: ScheduleRun | None = None
    shrinking: int = 0  # runs used for shrinking
    repeats: bool = True  # if the other one gave the same result in every repetition
    buffered: ScheduleRun | None = None
    covered: SearchCoverage | None = None  # if schedules were enumerated
