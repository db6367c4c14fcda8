"""What a run says of its progress: the listener that hears it, and where it is, in words."""

from collections.abc import Sequence
from typing import Protocol

from distcheck.records import Case

NOT_FINISHED = "skipped: this code does not handle missing gradients, which is optional"


class Listener(Protocol):
    """Hears of progress as it happens; a subclass overrides what it cares for."""

    def preparing(self, what: str) -> None:
        return

    def planned(self, cases: Sequence[Case], *, before: int = 0) -> None:
        """Every case that will run; `before` others were judged by an earlier start of the run."""
        return

    def progress(self, case: Case, what: str) -> None:
        return

    def finished(self, case: Case, verdict: str) -> None:
        """A case has been judged, with this verdict; or NOT_FINISHED."""
        return


class Silent(Listener):
    """A listener that shows nothing."""


def step_in_words(step: int, steps: int, phase: str) -> str:
    """Where a rank is: "step 2 of 3, sync". After the last step there are phases as well."""
    return f"step {step + 1} of {steps}, {phase}" if step < steps else f"all steps done, {phase}"


def steps_in_words(steps: Sequence[int]) -> str:
    """Steps as the screen counts them, from 1: "step 3", "steps 1 to 4"; none: the whole run."""
    numbers = [step + 1 for step in sorted(steps)]
    if not numbers:
        return "the whole run"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"
