"""Model-parallel layouts: right code passes, and what does not fit is refused in one sentence."""

import pytest

import distcheck
from distcheck.errors import UsageError
from tests.correct import LAYOUTS

SMALL = "tests.mutants.small:Small"
WORLDS = {"data_tensor": 4, "data_pipeline": 4}
DTYPES = [("float32", "S32"), pytest.param("float64", "S64", marks=pytest.mark.sweep)]


@pytest.mark.parametrize(("dtype", "layer"), DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_right_layouts_pass(name: str, dtype: str, layer: str) -> None:
    asked = {"world": WORLDS.get(name, 2), "dtype": dtype, "batch": 32, "separate": False}
    report = distcheck.verify(name, workload=SMALL, **asked)
    report.raise_for_verdict()
    (case,) = report.cases
    layers = {check.check: check.layer for check in case.checks}
    assert layers["gradients"] == layers["loss"] == layer
    assert any("not by the bitwise and rounding-bound layers" in note for note in case.notes)


def test_a_mesh_that_is_not_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data -1 x tensor 2 needs a multiple of 2 ranks"):
        distcheck.verify("data_tensor", world=3, workload=SMALL)


def test_samples_at_a_kink_may_be_on_either_side_of_it() -> None:
    report = distcheck.verify(
        "row_parallel", world=2, workload="tests.unusual.at_kinks:AtAKink", dtype="float32",
        batch=256, separate=False,
    )  # fmt: skip
    report.raise_for_verdict()
    (gradients,) = [c for c in report.cases[0].checks if c.check == "gradients"]
    assert "on which side of a kink" in gradients.reason
