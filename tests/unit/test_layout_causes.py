"""Causes of a factor in a model-parallel layout, from measurements."""

from typing import Any

import pytest

from distcheck.judge.diagnosis import layouts
from distcheck.judge.diagnosis.measurements import LayoutFacts, LayoutParameter


def causes(factor: float, error: float, **about: Any) -> list[str]:
    parameter = LayoutParameter(
        name="w", module="", wrong=(0, 1), factor=factor, factor_error=error
    )
    given: dict[str, Any] = {
        "step": 0, "axes": (("data", 1), ("tensor", 2)), "micro_batches": 1, "total": 1,
        "by_tokens": False, "parameters": (parameter,), "right": (), "loss_is_wrong": False,
        "loss": 1.0, "expected_loss": 1.0,
    }  # fmt: skip
    return [found.cause for found in layouts.explain({}, LayoutFacts(**given | about))]


@pytest.mark.parametrize(
    ("factor", "error", "expected"),
    [
        (2.0, 0.0, ["extra-reduction"]),
        (2.0005, 0.0, ["wrong-divisor"]),
        (
            2.0005,
            1e-3,
            ["extra-reduction"],
        ),  # a gradient that nearly cancels: its rounding moves it
        (1.9995, 1e-3, ["extra-reduction"]),
        (0.5003, 1e-3, ["extra-division"]),
        (2.1, 1e-3, ["wrong-divisor"]),
    ],
)
def test_a_factor_may_be_rounded(factor: float, error: float, expected: list[str]) -> None:
    assert causes(factor, error) == expected


def test_all_causes_that_explain_a_factor_are_named() -> None:
    both = ["pipeline-not-scaled", "extra-reduction"]
    assert causes(2.0005, 1e-3, micro_batches=2) == both
    assert causes(1.9995, 1e-3, micro_batches=2) == both
