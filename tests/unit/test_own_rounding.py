"""How far rounding alone may take what a layout computes, by runs from parameters moved a bit."""

import math
from typing import Any

import pytest
import torch

from distcheck.judge.oracles.full_batch import FullBatch
from distcheck.judge.oracles.own_rounding import OwnRounding, Taken


class Reference:
    """Runs whose first gradient is off by `errors`, one run after the other."""

    def __init__(self, *errors: float, elements: int = 1) -> None:
        self.errors, self.elements, self.ran = errors, elements, 0

    def run(self, step: int, *, moved: int) -> FullBatch:
        assert (step, moved) == (2, self.ran)
        self.ran += 1
        return self.made(self.errors[moved])

    def made(self, error: float) -> FullBatch:
        each = error / math.sqrt(self.elements)
        return FullBatch(1.0, [torch.full((self.elements,), each), None], ghost=False)


def first(batch: FullBatch) -> torch.Tensor | None:
    return batch.gradients[0]


def allowed(reference: Reference, *, error: float, taken: Taken = first) -> float:
    given: Any = reference
    return OwnRounding(given, 2, reference.made(0.0)).allows(taken, error=error, bound=1.0)


@pytest.mark.parametrize(("own", "allows"), [(0.0, 0.0), (0.24, 0.0), (0.26, 4.16), (3.0, 48.0)])
def test_a_bound_holds_unless_rounding_takes_much_of_it(own: float, allows: float) -> None:
    reference = Reference(own, elements=64)
    assert allowed(reference, error=2.0) == pytest.approx(allows)
    assert reference.ran == 1


def test_of_few_numbers_the_largest_of_four_runs_counts() -> None:
    reference = Reference(0.01, 0.5, 0.02, 0.1)
    assert allowed(reference, error=2.0) == pytest.approx(8.0)
    assert reference.ran == 4


def test_an_error_that_no_chance_explains_needs_one_run() -> None:
    reference = Reference(0.5)
    assert allowed(reference, error=1e6) == pytest.approx(8.0)
    assert reference.ran == 1


@pytest.mark.parametrize("own", [math.nan, math.inf])
def test_runs_without_a_number_allow_nothing(own: float) -> None:
    assert allowed(Reference(own, elements=64), error=2.0) == 0.0


def test_what_is_not_there_rounds_by_nothing() -> None:
    assert allowed(Reference(0.5), error=2.0, taken=lambda batch: batch.gradients[1]) == 0.0
