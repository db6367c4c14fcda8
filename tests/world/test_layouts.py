"""Model-parallel layouts: right code passes, and what does not fit is refused in one sentence."""

import os
import re
import subprocess
from collections.abc import Sequence
from functools import partial

import pytest
from distcheck_strategies.row_parallel import RowParallel
from torch import nn

import distcheck
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from tests.correct import LAYOUTS
from tests.mutants.divided import RIGHT
from tests.mutants.small import Small
from tests.world.command import COMMAND, ROOT

SMALL = "tests.mutants.small:Small"
sweep = partial(pytest.param, marks=pytest.mark.sweep)
WORKLOADS = {
    "expert_parallel": "experts", "sequence_parallel": "transformer",
    "context_parallel": "transformer",
    "transformer_tensor": "transformer",
}  # fmt: skip
WORLDS = {"data_tensor": 4, "data_pipeline": 4}
# One of each kind: pieces, DTensors in a mesh, stages, experts.
QUICK = ("column_parallel", "data_tensor", "pipeline", "expert_parallel")
DTYPES = [
    ("float32", "full batch float32"),
    pytest.param("float64", "full batch float64", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("dtype", "layer"), DTYPES)
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in LAYOUTS]
)
def test_right_layouts_pass(name: str, dtype: str, layer: str) -> None:
    asked = {"world": WORLDS.get(name, 2), "dtype": dtype, "batch": 32, "separate": False}
    report = distcheck.verify(name, workload=WORKLOADS.get(name, SMALL), **asked)
    report.raise_for_verdict()
    (case,) = report.cases
    layers = {check.check: check.layer for check in case.checks}
    assert layers["gradients"] == layers["loss"] == layer
    assert any("the bitwise and rounding comparisons do not" in note for note in case.notes)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_alone_says_enough(name: str) -> None:
    report = distcheck.verify(name, separate=False).raise_for_verdict()
    assert [case.case.dtype for case in report.cases] == ["float32", "float64"]
    assert report.left_out == {}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", RIGHT)
def test_right_twins_of_what_is_divided_pass(name: str, world: int, dtype: str) -> None:
    if name == "RightTokens" and world == 4:
        world = 3  # of six positions
    distcheck.verify(
        f"tests.mutants.divided:{name}", workload=f"tests.mutants.small:{RIGHT[name]}",
        world=world, dtype=dtype, batch=32, separate=False,
    ).raise_for_verdict()  # fmt: skip


def test_a_loop_that_would_clip_by_parts_is_left_out() -> None:
    workload = "tests.mutants.small:ClippedByTheLoop"
    with pytest.raises(UsageError, match=r"define clip\(model, max_norm\)"):
        distcheck.verify("tensor_parallel", workload=workload, world=2, dtype="float32")


@pytest.mark.parametrize(
    ("name", "workload", "world", "said"),
    [
        ("transformer_tensor", "transformer", 3, "4 heads cannot be divided by 3 ranks"),
        sweep("tensor_parallel", SMALL, 7, "16 outputs leave some of 7 ranks without any"),
        sweep("pipeline_by_hand", SMALL, 3, "3 stages need an nn.Sequential of at least 3 layers"),
        sweep("tensor_parallel", "transformer", 2, "it is a Transformer, and not a chain"),
    ],
)
def test_an_indivisible_model_refused(name: str, workload: str, world: int, said: str) -> None:
    with pytest.raises(UsageError, match=f"does not shard this model: {said}"):
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


class OffByOne(RowParallel):
    """Every output is larger by one, which cross-entropy does not see."""

    def wrap(self, model: nn.Module) -> nn.Module:
        super().wrap(model).register_forward_hook(lambda m, given, outputs: outputs + 1.0)
        return model


@pytest.mark.parametrize(
    ("name", "dtype", "verdict"),
    [
        ("row_parallel", "float32", "unknown"),
        sweep("row_parallel", "float64", "pass"),
        (f"{__name__}:OffByOne", "float32", "fail"),
    ],
)
def test_canceling_outputs_may_be_rounded(name: str, dtype: str, verdict: str) -> None:
    report = distcheck.verify(
        name, world=2, workload="tests.unusual.canceling:Canceling", dtype=dtype, batch=64,
        steps=1, separate=False,
    )  # fmt: skip
    (case,) = report.cases
    assert {c.check: c.verdict for c in case.checks if c.verdict != "pass"} == (
        {} if verdict == "pass" else {"outputs": verdict}
    )


class TwiceTheFirst(RowParallel):
    """The gradient of the first layer is twice the right one."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        first = next(iter(wrapped.parameters()))
        first.register_hook(lambda gradient: 2 * gradient)
        return wrapped


@pytest.mark.parametrize(
    ("name", "verdicts", "causes"),
    [
        ("row_parallel", {"outputs": "unknown", "gradients": "unknown", "loss": "unknown"}, []),
        (f"{__name__}:TwiceTheFirst",
         {"outputs": "unknown", "gradients": "fail", "loss": "unknown"}, ["extra-reduction"]),
        sweep(
            f"{__name__}:OffByOne",
            {"outputs": "fail", "gradients": "fail", "loss": "fail"},
            ["wrong-output"],
        ),
    ],
)  # fmt: skip
def test_gradients_and_losses_that_cancel_are_not_accused_of_their_rounding(
    name: str, verdicts: dict[str, str], causes: list[str]
) -> None:
    (case,) = distcheck.verify(
        name, world=2, workload="tests.unusual.canceling:CancelingLoss", dtype="float32",
        batch=64, steps=1, separate=False,
    ).cases  # fmt: skip
    assert {c.check: c.verdict for c in case.checks if c.verdict != "pass"} == verdicts
    assert [finding.cause for finding in case.diagnosis] == causes


def test_a_pipelines_loss_of_both_signs_is_judged_by_the_size_of_its_terms() -> None:
    distcheck.verify(
        "pipeline_by_hand", world=2, workload="tests.unusual.canceling:BothSigns",
        dtype="float32", batch=64, steps=1, separate=False,
    ).raise_for_verdict()  # fmt: skip


@pytest.mark.sweep
def test_outputs_that_no_loss_function_was_given_are_not_compared_and_it_is_said() -> None:
    (case,) = distcheck.verify(
        "tests.mutants.divided:RightVocabulary", world=2, workload=SMALL, dtype="float32", steps=1,
        batch=32, separate=False,
    ).cases  # fmt: skip
    assert case.verdict == "pass"
    assert "outputs" not in {check.check for check in case.checks}
    assert any(note.startswith("outputs are not compared") for note in case.notes)


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
    with pytest.raises(UsageError, match="also shards the model in a different way"):
        accessed("DTensorsAndPieces")


def test_one_accessor_needs_the_other() -> None:
    with pytest.raises(UsageError, match=r"has full_gradients\(model\) but no full_parameters"):
        accessed("HalfAPair")


MESHES = [
    *((name, world, SMALL) for name in ("column_parallel", "row_parallel", "tensor_parallel")
      for world in (2, 4)),
    *((name, world, SMALL) for name in ("data_tensor", "data_pipeline") for world in (4, 8)),
    *((name, 2, SMALL) for name in ("pipeline", "pipeline_1f1b", "pipeline_by_hand")),
    *((name, world, WORKLOADS[name]) for name in WORKLOADS for world in (2, 4)),
    ("pipeline", 3, "mlp"), ("pipeline_by_hand", 3, "mlp"), ("pipeline_1f1b", 4, "cnn"),
    ("tensor_parallel", 2, "cnn"), ("column_parallel", 8, "mlp"), ("tensor_parallel", 8, "mlp"),
    ("data_tensor", 4, "mlp"),
]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "world", "workload"), MESHES)
def test_no_right_layout_is_accused(
    name: str, world: int, workload: str, dtype: str, seed: int
) -> None:
    asked = {"world": world, "workload": workload, "dtype": dtype, "seed": seed, "batch": 64}
    distcheck.verify(name, **asked, separate=False).raise_for_verdict()


class Astray(Small):
    """A sampler that takes the rank from the environment: ranks that share a model read other
    samples.
    """

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        return range(100 * int(os.environ["RANK"]), size)


def test_ranks_that_share_a_model_must_read_the_same_samples() -> None:
    report = distcheck.verify(
        "column_parallel", world=2, workload=f"{__name__}:Astray", dtype="float32", batch=32,
        steps=1, separate=False,
    )  # fmt: skip
    assert "data" in {c.check for c in report.cases[0].checks if c.verdict == "fail"}


@pytest.mark.sweep
def test_accuracy_of_a_pipeline_is_taken_with_the_statistics_of_every_stage() -> None:
    workload = "tests/unusual/statistics_on_a_stage.py:Shifted"
    words = ["train", "--strategy", "pipeline", "--world", "2", "--steps", "20"]
    ran = subprocess.run(
        [*COMMAND, *words, "--workload", workload], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"accuracy (100\.00|99\.\d\d)%", ran.stdout), ran.stdout
