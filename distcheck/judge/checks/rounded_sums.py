"""The lattice for code that rounds on the way, which R allows where no order is promised: a remark
in place of a failure (`oracles/inexact_sums.py`).
"""

from collections.abc import Callable
from functools import partial

import torch

from distcheck.judge.checks.comparison import Comparison, within
from distcheck.judge.checks.matching import Compare
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.inexact_sums import began_rounded, standing


def or_within_rounding(exact: Compare, expectation: StepExpectation, index: int) -> Compare:
    """Gradients: `exact`, or within R."""

    def other(actual: torch.Tensor) -> Comparison | None:
        interval = expectation.interval(index) if rounds(expectation) else None
        if interval is None:
            return None
        return within(actual, interval.mean, interval.bound)

    return partial(_either, exact, other)


def or_from_recorded(
    exact: Compare, expectation: StepExpectation, beside: Callable[[], Compare | None]
) -> Compare:
    """What follows from the state that a step began with: `exact`, or `beside`, which starts from
    that state.
    """

    def other(actual: torch.Tensor) -> Comparison | None:
        compare = beside() if began_rounded(expectation) else None
        return None if compare is None else compare(actual)

    return partial(_either, exact, other)


def rounds(expectation: StepExpectation) -> bool:
    """Whether sums are rounded on the way in this step, or were in one before it."""
    return standing(expectation) == "rounded" or began_rounded(expectation)


def remark(expectation: StepExpectation, tally: Tally) -> None:
    """Says of a step whose sums were rounded that they were."""
    if expectation.standings.get(expectation.step) == "rounded":
        tally.excuse(
            "sums are rounded on the way, by no more than R allows for any order: the exact ones "
            "are asked of code that promises an order"
        )


def _either(
    exact: Compare, other: Callable[[torch.Tensor], Comparison | None], actual: torch.Tensor
) -> Comparison:
    found = exact(actual)
    return found if found.ok else other(actual) or found
