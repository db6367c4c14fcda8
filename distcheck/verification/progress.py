"""The interface for listeners to a run's progress, and positions in a run as text."""

from collections.abc import Sequence
from typing import Protocol

from distcheck.records import Case

NOT_FINISHED = "skipped: this code does not handle missing gradients, which is optional"


class Listener(Protocol):
    """Interface for progress as it happens; a subclass overrides the methods that it needs."""

    def preparing(self, what: str) -> None:
        return

    def planned(self, cases: Sequence[Case], *, before: int = 0) -> None:
        """Receive every case to run; `before` others were judged in an earlier start of the run."""
        return

    def progress(self, case: Case, what: str) -> None:
        return

    def finished(self, case: Case, verdict: str) -> None:
        """Receive the verdict of a judged case, or NOT_FINISHED."""
        return


class Silent(Listener):
    """A listener that shows nothing."""


def step_in_words(step: int, steps: int, phase: str) -> str:
    """Return a rank's position: "step 2 of 3, sync". There are phases after the last step, too."""
    return f"step {step + 1} of {steps}, {phase}" if step < steps else f"all steps done, {phase}"


def steps_in_words(steps: Sequence[int]) -> str:
    """Return steps counted from 1: "step 3", "steps 1 to 4"; for none: "the whole run"."""
    numbers = [step + 1 for step in sorted(steps)]
    if not numbers:
        return "the whole run"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"steps {numbers[0]} to {numbers[-1]}"
    return f"steps {', '.join(map(str, numbers))}"
