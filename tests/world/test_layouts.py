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
