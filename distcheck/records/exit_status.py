"""How a rank ended, as data and in words, and the order in which ends are blamed. No torch."""

from enum import StrEnum
from typing import Literal

import msgspec

from distcheck.records.decoding import Int

# The place of each end among the causes of a failed run: the least is the cause.
_PLACES = {"lost": -1, "killed": 0, "exited": 0, "raised": 0, "hung": 1, "ended": 3, "finished": 4}
# How the sentence begins that says why a world could go no further, or was stopped.
PROVEN = {
    "mismatch": "calls that do not match",
    "deadlock": "proven deadlock",
    "asleep": "a rank that sleeps",
    "refused": "refused",
    "unmatched": "a message without its other end",
    "tensor-used-in-flight": "a tensor in use",
    "work-not-waited": "a work that was not waited for",
    "work-waited-twice": "a work that was waited for twice",
}
# Of these, what one rank did by itself: the world was stopped there, and it is the name of a cause.
MISUSES = ("tensor-used-in-flight", "work-not-waited", "work-waited-twice")
SECONDARY_FAILURE = 2  # the place of a rank that raised since its peer was gone: after what hung


class RankEnd(StrEnum):
    """How a rank ended; its value is what reports hold."""

    LOST = "lost"  # its machine could not be reached
    KILLED = "killed"  # a signal that distcheck did not send ended it
    EXITED = "exited"  # it left before its last step, or could not be started
    RAISED = "raised"  # an exception ended it
    HUNG = "hung"  # it made no progress within the deadline, or was proven to wait for ever
    ENDED = "ended"  # distcheck ended it, because another rank had failed
    FINISHED = "finished"  # it trained all its steps

    @property
    def place(self) -> int:
        """Its place among the causes of a failed run: of several ends the least is the cause."""
        return _PLACES[self.value]


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a rank entered, as torch's flight recorder has it: its number within the group,
    whether it was seen to complete, and the line that made it, where stacks were asked for.
    """

    number: Int
    name: str
    shapes: str
    group: str = ""
    point_to_point: bool = False
    finished: bool = True
    place: str = ""

    @property
    def call(self) -> str:
        """What was called: `all_reduce of [64x3], number 2`."""
        return f"{self.name} of [{self.shapes}], number {self.number}"

    def in_words(self, *, unfinished: bool = True, place: bool = True) -> str:
        """The call, whether it did not complete, and where it was made."""
        open_ = ", not finished" if unfinished and not self.finished else ""
        return f"{self.call}{open_}{f' at {self.place}' if place and self.place else ''}"


# Why a rank that was asked what it does gave no answer of its own.
Silence = Literal["", "stopped", "no answer", "no turn"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended, and what is known of that; `detail` says it in words.

    run           which run that was, where it was not the first: "in the rerun"
    step, phase   where it was; no step: before the first
    lost_peer     whether it ended because another one had; it noticed at `lost_at`
    proven, why   why its world could go no further: a word of PROVEN, and a sentence
    sizes_differ  whether a backend ended it, as what it got was not of the size of its call
    ended_by      in a line: the signal, the exit code, or what became of the question what it does
    silence       why it did not answer that question itself
    error         what it raised, in a line: `ValueError: no hope`
    call          the last collective that it entered
    place         FILE:LINE, the innermost of its stack outside Python's own modules
    text          its traceback or its stacks, for a person
    output        the end of what it printed
    collectives   the last that it entered, oldest first, where it could be asked
    """

    rank: int
    outcome: RankEnd
    run: str = ""
    step: int | None = None
    phase: str = ""
    lost_peer: bool = False
    lost_at: str = ""
    proven: str = ""
    why: str = ""
    sizes_differ: bool = False
    ended_by: str = ""
    silence: Silence = ""
    error: str = ""
    call: Collective | None = None
    place: str = ""
    text: str = msgspec.field(default="", name="detail")  # as earlier files have all of it
    output: str = ""
    collectives: tuple[Collective, ...] = ()

    @property
    def where(self) -> str:
        """Where it was, and whether it lost its peer there."""
        return ": ".join(filter(None, [self.run, self._at]))

    @property
    def _at(self) -> str:
        step = "" if self.step is None else f"step {self.step}"
        at = ", ".join(filter(None, [step, self.phase]))
        if self.outcome == RankEnd.LOST:
            at = f"last heard of {'' if self.step is None else 'at '}{at}"
        return at + (f"; its peer was gone{self.lost_at}" if self.lost_peer else "")

    @property
    def last_call(self) -> str:
        """The line about the last collective that it entered; empty where none is known."""
        return "" if self.call is None else f"last collective: {self.call.in_words()}"

    @property
    def reason(self) -> str:
        """In a line, why it ended: what is proven of its world, or what ended it."""
        return f"{PROVEN[self.proven]}: {self.why}" if self.proven else self.ended_by

    @property
    def story(self) -> str:
        """What is known besides where it was."""
        why = f"{PROVEN[self.proven]}: {self.why}" if self.proven else ""
        place = [self.last_call, self.text.strip("\n")]
        if self.error:
            place.reverse()  # the traceback is what matters
        return "\n".join(filter(None, [why, self.ended_by, *place, self.output]))

    @property
    def detail(self) -> str:
        known = "\n".join(filter(None, [self._at, self.story]))
        return ": ".join(filter(None, [self.run, known]))
