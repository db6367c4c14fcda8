"""How a rank can end, and the order in which ends are blamed. No torch."""

from enum import StrEnum

# end: its place among the causes of a failed run (the least is the cause), what it means
_TABLE = {
    "lost": (-1, "its machine could not be reached"),
    "killed": (0, "a signal that distcheck did not send ended it"),
    "exited": (0, "it left before its last step, or could not be started"),
    "raised": (0, "an exception ended it"),
    "hung": (1, "it made no progress within the deadline, or was proven to wait for ever"),
    "ended": (3, "distcheck ended it, because another rank had failed"),
    "finished": (4, "it trained all its steps"),
}
# How the sentence begins that says why a world could go no further, or was stopped.
PROVEN = {
    "mismatch": "calls that do not match",
    "deadlock": "proven deadlock",
    "asleep": "a rank that sleeps",
    "refused": "refused",
    "unmatched": "a message without its other end",
    "buffer-in-flight": "a tensor in use",
    "work-not-waited": "a work that was not waited for",
    "work-waited-twice": "a work that was waited for twice",
}
STOPPED = "stopped (state T)"  # in the detail of a rank that was stopped when the world was ended
# Of these, what one rank did by itself: the world was stopped there, and it is the name of a cause.
MISUSES = ("buffer-in-flight", "work-not-waited", "work-waited-twice")
VICTIM = 2  # the place of a rank that raised since its peer was gone: after what hung


def proven_in(detail: str) -> tuple[str, str]:
    """Why a world ended, in the words of PROVEN, and that in a sentence: by the second line of what
    is known of a rank, if it says so.
    """
    how, _, what = "".join(detail.splitlines()[1:2]).partition(": ")
    return how, what


class RankEnd(StrEnum):
    """How a rank ended; its value is what reports hold."""

    LOST = "lost"
    KILLED = "killed"
    EXITED = "exited"
    RAISED = "raised"
    HUNG = "hung"
    ENDED = "ended"
    FINISHED = "finished"

    @property
    def place(self) -> int:
        """Its place among the causes of a failed run: of several ends the least is the cause."""
        return _TABLE[self.value][0]

    @property
    def meaning(self) -> str:
        """What it says of the rank, for a table."""
        return _TABLE[self.value][1]
