"""Exit status of a rank, as data and text; precedence of failures. Does not import torch."""

from enum import StrEnum
from typing import Literal

import msgspec

from distcheck.records.decoding import Int

# Precedence among the causes of a failed run: the smallest is the cause.
_PLACES = {"lost": -1, "killed": 0, "exited": 0, "raised": 0, "hung": 1, "ended": 3, "finished": 4}
_VERBS = {
    "lost": "{} lost", "killed": "{} killed", "exited": "exited", "raised": "raised an exception",
    "hung": "hung", "ended": "{} terminated", "finished": "finished",
}  # fmt: skip
# Beginning of the sentence about why a world was blocked or stopped.
PROVEN = {
    "mismatch": "mismatched calls",
    "deadlock": "proven deadlock",
    "asleep": "sleeping rank",
    "refused": "refused",
    "unmatched": "unmatched message",
    "tensor-used-in-flight": "tensor in flight",
    "work-not-waited": "work not waited for",
    "work-waited-twice": "work waited for twice",
}
# Misuses by a single rank: the world was stopped there; each is the name of a cause.
MISUSES = ("tensor-used-in-flight", "work-not-waited", "work-waited-twice")
SECONDARY_FAILURE = 2  # of a rank that raised because its peer exited: after hung ranks


class RankEnd(StrEnum):
    """Exit status of a rank. Reports use the value of a member."""

    LOST = "lost"  # its machine could not be reached
    KILLED = "killed"  # killed by a signal that distcheck did not send
    EXITED = "exited"  # exited before its last step, or could not be started
    RAISED = "raised"  # ended by an exception
    HUNG = "hung"  # no progress within the deadline, or a proven deadlock
    ENDED = "ended"  # ended by distcheck because another rank had failed
    FINISHED = "finished"  # completed all its steps

    @property
    def place(self) -> int:
        """Precedence among the failures of a run: the smallest value is the cause."""
        return _PLACES[self.value]

    def in_words(self, at: str = "", *, several: bool = False) -> str:
        """Return the end as a predicate: `was killed in step 1 (sync)`."""
        verb = _VERBS[self.value].format("were" if several else "was")
        if at.startswith("step "):
            return f"{verb} in {at}"
        return f"{verb}{' ' if at.startswith(('before ', 'in ')) else ': ' * bool(at)}{at}"


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a rank entered, from torch's flight recorder.

    It has the call's number within the group, True if the call completed, and its source line if
    stacks were recorded.
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
        """The call as text: `all_reduce of [64x3], number 2`; `barrier, number 1`."""
        return f"{self.with_shapes(self.shapes)}, number {self.number}"

    def with_shapes(self, shapes: str) -> str:
        return f"{self.name} of [{shapes}]" if shapes else self.name

    def in_words(self, *, unfinished: bool = True, place: bool = True) -> str:
        """Return the call as text, "not finished" unless it completed, and its source line."""
        open_ = ", not finished" if unfinished and not self.finished else ""
        return f"{self.call}{open_}{f' at {self.place}' if place and self.place else ''}"


# Why a rank did not reply to a status request.
Silence = Literal["", "stopped", "no answer", "no turn"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The exit status of one rank, with known circumstances; `detail` is the text.

    run           the run, if not the first: "in the rerun"
    step, phase   position in the training; step None: before the first
    lost_peer     True if the rank ended because a peer had ended
    lost_at       place where it noticed that
    proven        proof that its world was blocked: a key of PROVEN
    why           sentence that explains the proof
    sizes_differ  True if a backend ended the rank because received data had a different size
    ended_by      one line: the signal, the exit code, or the result of a status request
    silence       reason that the rank did not reply itself
    error         its exception, in one line: `ValueError: no hope`
    call          the most recent collective that it entered
    place         FILE:LINE of the innermost stack frame outside Python's own modules
    text          its traceback or stacks, for people
    output        the end of its output
    collectives   its most recent collectives, oldest first, if known
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
    text: str = ""
    output: str = ""
    collectives: tuple[Collective, ...] = ()

    @property
    def where(self) -> str:
        """Return the position, and the place where the rank lost its peer, if it did."""
        return ": ".join(filter(None, [self.run, self._format_step]))

    @property
    def _format_step(self) -> str:
        at = self.phase
        if self.step is not None:
            at = f"step {self.step}{f' ({self.phase})' if self.phase else ''}"
        if self.outcome == RankEnd.LOST:
            at = f"last heartbeat {'' if self.step is None else 'in '}{at}"
        return at + (f"; secondary failure (peer exited){self.lost_at}" if self.lost_peer else "")

    @property
    def last_call(self) -> str:
        """Return the line about the most recent collective that the rank entered, or ""."""
        return "" if self.call is None else f"last collective: {self.call.in_words()}"

    @property
    def reason(self) -> str:
        """Return the reason in one line: the proof about the world, or the exit status."""
        return f"{PROVEN[self.proven]}: {self.why}" if self.proven else self.ended_by

    @property
    def circumstances(self) -> str:
        """Return all circumstances except the position."""
        why = f"{PROVEN[self.proven]}: {self.why}" if self.proven else ""
        known = [self.last_call, self.text.strip("\n"), self.output]
        if self.error:  # the end of the traceback is what matters
            known.insert(0, known.pop())
        return "\n".join(filter(None, [why, self.ended_by, *known]))

    @property
    def detail(self) -> str:
        known = "\n".join(filter(None, [self._format_step, self.circumstances]))
        return ": ".join(filter(None, [self.run, known]))
