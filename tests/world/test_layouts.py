"""Model-parallel layouts: right code passes, and what does not fit is refused in one sentence."""

import pytest

import distcheck
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from tests.correct import LAYOUTS

SMALL = "tests.mutants.small:Small"
WORKLOADS = {
    "expert_parallel": "experts", "sequence_parallel": "transformer",
    "transformer_tensor": "transformer",
}  # fmt: skip
WORLDS = {"data_tensor": 4, "data_pipeline": 4}
DTYPES = [("float32", "S32"), pytest.param("float64", "S64", marks=pytest.mark.sweep)]


@pytest.mark.parametrize(("dtype", "layer"), DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_right_layouts_pass(name: str, dtype: str, layer: str) -> None:
    asked = {"world": WORLDS.get(name, 2), "dtype": dtype, "batch": 32, "separate": False}
    report = distcheck.verify(name, workload=WORKLOADS.get(name, SMALL), **asked)
    report.raise_for_verdict()
    (case,) = report.cases
    layers = {check.check: check.layer for check in case.checks}
    assert layers["gradients"] == layers["loss"] == layer
    assert any("not by the bitwise and rounding-bound layers" in note for note in case.notes)


@pytest.mark.parametrize(
    ("name", "workload", "world", "said"),
    [
        ("transformer_tensor", "transformer", 3, "4 heads cannot be divided by 3 ranks"),
        ("pipeline_by_hand", SMALL, 3, "3 stages need an nn.Sequential of at least 3 layers"),
        ("tensor_parallel", "transformer", 2, "it is a Transformer, and not a chain of layers"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    name: str, workload: str, world: int, said: str
) -> None:
    with pytest.raises(UsageError, match=f"does not divide this model: {said}"):
        distcheck.verify(name, world=world, workload=workload, dtype="float32")


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


def accessed(name: str) -> CaseReport:
    report = distcheck.verify(
        f"tests.unusual.accessors:{name}", world=2, workload=SMALL, dtype="float32", steps=2,
        separate=False,
    )  # fmt: skip
    (case,) = report.cases
    return case


def test_accessors_put_the_model_together() -> None:
    assert accessed("WithAccessors").verdict == "pass"


@pytest.mark.parametrize(
    ("name", "check", "reason"),
    [
        ("GivesNoGradients", "gradients", "full_gradients(model) returned nothing for 0.weight"),
        ("LeavesOneOut", "initial state", "full_parameters(model) returned nothing for 0.bias"),
    ],
)
def test_an_accessor_that_returns_nothing_is_no_pass(name: str, check: str, reason: str) -> None:
    case = accessed(name)
    assert case.verdict == "unknown"
    (found,) = [one for one in case.checks if one.check == check]
    assert found.verdict == "unknown"
    assert reason in found.reason


def test_dtensors_beside_pieces_are_refused() -> None:
    with pytest.raises(UsageError, match="divides the model in another way as well"):
        accessed("DTensorsAndPieces")


def test_one_accessor_needs_the_other() -> None:
    with pytest.raises(UsageError, match=r"has full_gradients\(model\) and no full_parameters"):
        accessed("HalfAPair")
