"""Cells: correct strategies pass, what cannot do one says so, and nothing passes for nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import distcheck
from distcheck.contract import Batch, Training
from distcheck.errors import UsageError
from distcheck.records import CaseReport, Report
from distcheck.verification.contents import _FEATURES
from distcheck.workloads.cells import CELLS
from distcheck.workloads.cells.samples import FEATURES, CellSamples, CellWorkload
from tests.mutants.workloads import Normalized
from tests.world.test_verify import assert_everything_compared

# What each of the built-in strategies does not take part in.
AFTER_BACKWARD = {"absent_on_some", "different_starts"}
LEFT_OUT = {
    "allreduce": AFTER_BACKWARD,
    "gather_scatter": {"complex", "complex128", "sparse", *AFTER_BACKWARD},
    "ring": {"sparse", *AFTER_BACKWARD},
    "zero1": {"mixed_dtypes", "complex", "complex128", *AFTER_BACKWARD},
    "ddp": {"unused_parameters", "unused_later", "frozen_later", "unfrozen_later",
        "absent_on_some"},
    "ddp_find_unused": {"unfrozen_later"},
}  # fmt: skip
LARGE = ("over_25_mib", "over_2_24_elements")  # seconds each
# Cells in which strategies of one kind differ from one another; the others are run by `allreduce`.
TELLING = {
    "ring": {"indivisible_sizes", "zero_size", "transposed"},
    "gather_scatter": {"channels_last"},
    "zero1": {"unused_parameters", "loss_scaling", "resume"},
    "ddp": {"bucket_boundaries", "mixed_dtypes", "accumulation", "resume"},
    "ddp_find_unused": {"absent_on_some", "different_starts"},
}


# What no pass shows without a cell has one, as docs/what-equal-means.md says.
IN_CELLS_THAT_ALLREDUCE_DECLINES = {"absent_on_some", "starts_apart"}


def features_of(report: Report) -> set[str]:
    return {one for case in report.cases if case.contents for one in case.contents.features}


def assert_cells(report: Report, left_out: set[str], cells: set[str]) -> None:
    assert_everything_compared(report)
    assert {case.case.workload for case in report.cases} == cells - left_out
    said = {note.split()[1] for case in report.cases for note in case.notes if "left out" in note}
    assert said == left_out


@pytest.mark.sweep
def test_every_cell() -> None:
    report = distcheck.verify(
        "allreduce", world=3, workload="tied_weights", thorough=True, explore_s=0, without=LARGE
    )
    assert_cells(report, {*AFTER_BACKWARD, *LARGE}, set(CELLS))
    by_name = {case.case.workload: case for case in report.cases}
    for name in by_name:
        cell = CELLS[name]
        layers = {r.layer for r in by_name[name].checks if r.check == "gradients"}
        expected = (
            {"bitwise", "rounding"}
            if name == "dropout"
            else {"bitwise", "rounding", "full batch float32"} - set(cell.without)
        )
        assert layers == expected, name
    assert by_name["resume"].case.steps == 4
    assert set(_FEATURES) - features_of(report) == IN_CELLS_THAT_ALLREDUCE_DECLINES


@pytest.mark.parametrize("strategy", TELLING)
def test_the_cells_that_tell_strategies_apart(strategy: str) -> None:
    cells = TELLING[strategy]
    report = distcheck.verify(strategy, world=2, workload=sorted(cells), steps=3, separate=False)
    assert_cells(report, set(), cells)
    if "different_starts" in cells:
        assert features_of(report) >= IN_CELLS_THAT_ALLREDUCE_DECLINES


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("strategy", LEFT_OUT)
def test_no_cell_raises_a_false_alarm(strategy: str, world: int) -> None:
    report = distcheck.verify(
        strategy, world=world, workload="tied_weights", thorough=True, explore_s=0
    )
    assert_cells(report, LEFT_OUT[strategy], set(CELLS))


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp_static_graph", "ddp_small_buckets", "ddp_bucket_view",
                                      "ddp_no_sync", "ddp_bf16_hook", "reduce_broadcast",
                                      "parameter_server", "fsdp"])  # fmt: skip
@pytest.mark.parametrize("world", [2, 3, 4])
def test_no_cell_raises_a_false_alarm_elsewhere(strategy: str, world: int) -> None:
    report = distcheck.verify(
        strategy, world=world, workload="tied_weights", thorough=True, explore_s=0
    )
    assert_everything_compared(report)


def test_a_cell_that_is_declined_is_left_out() -> None:
    with pytest.raises(
        UsageError, match="sparse cannot run with ring at world size 2: its contract"
    ):
        distcheck.verify("ring", world=2, workload="sparse")
    with pytest.raises(
        UsageError, match="'tied' is not a cell of --thorough; choose from tied_weights"
    ):
        distcheck.verify("ring", world=2, thorough=True, without="tied")


class Accumulating(Normalized):
    """A person's own workload, which holds what a cell does."""

    training = Training(accumulate=2)


@pytest.mark.usefixtures("no_rerun")
def test_a_workload_of_ones_own_accumulates_as_the_cell_does() -> None:
    own = f"{__name__}:Accumulating"
    asked = {"world": 3, "workload": own, "batch": 29, "steps": 2}
    report = distcheck.verify("allreduce", **asked)
    assert_everything_compared(report)
    found = {(result.check, result.layer): result for result in report.cases[0].checks}
    assert (
        "its own micro-batches (5, 5, 5, 5, 5, 4)"
        in found["gradients", "full batch float32"].reason
    )
    with pytest.raises(UsageError, match="ddp_no_sync at world size 3: it runs backward itself"):
        distcheck.verify("ddp_no_sync", **asked)


class Branches(nn.Module):
    """Only what is bright in its first corner goes through the second layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.every, self.some = nn.Linear(3072, classes), nn.Linear(3072, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        chosen = (flat[:, 0] > 1.7).nonzero().flatten()
        scores = self.every(flat)
        return scores.index_add(0, chosen, self.some(flat[chosen])) if len(chosen) else scores


class Branching(Normalized):
    """The samples choose a layer: rank 0 reaches it in the first step, rank 2 in the second."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Branches(classes)


@pytest.mark.usefixtures("no_rerun")
def test_a_layer_that_only_some_ranks_reach() -> None:
    report = distcheck.verify(
        "ddp_find_unused", world=3, workload=f"{__name__}:Branching", batch=9, steps=2
    )
    assert_everything_compared(report)
    layers = {r.layer for r in report.cases[0].checks if r.check == "gradients"}
    assert layers == {"bitwise", "rounding", "full batch float32"}


class Perceptron(CellWorkload):
    """Two layers."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4))


class Autocast(Perceptron):
    """Mixed precision, as training scripts have it."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        with torch.autocast(batch.inputs.device.type, dtype=torch.bfloat16):
            logits = model(batch.inputs)
        return F.cross_entropy(logits.float(), batch.labels)


class Canceling(Perceptron):
    """A loss of both signs, as policy gradients have, whose large terms cancel in every epoch."""

    def samples(self) -> CellSamples:
        return CellSamples(255)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        advantages = 10.1 * (batch.ids - 127).to(batch.inputs)
        return (advantages + model(batch.inputs)[:, 0]).mean()


class FrozenStatistics(Normalized):
    """BatchNorm in eval mode, as fine-tuning has it."""

    def before_step(self, model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


# A workload of one's own, and what it is not judged by, and why.
OWN = {
    f"{__name__}:Autocast": "computes in bfloat16 as well",
    "distcheck.workloads.cells.dtypes:MixedDtypes": "computes in bfloat16 as well",
    "distcheck.workloads.cells.schedules:LossScaling": "",
    f"{__name__}:Canceling": "",
    f"{__name__}:FrozenStatistics": "",
}


def alone(model):  # type: ignore[no-untyped-def]
    """Exchanges nothing."""


def unweighted(model):  # type: ignore[no-untyped-def]
    """The mean over ranks, where one has a sample more."""
    plain(model)


def in_ones_own(strategy: str, *names: str) -> dict[str, CaseReport]:
    """One's own workloads, by their class."""
    own = [spec for spec in OWN if spec.rpartition(":")[2] in names]
    report = distcheck.verify(strategy, world=2, workload=own, batch=255, steps=2)
    return {case.case.workload.rpartition(":")[2]: case for case in report.cases}


def layers_of(case: CaseReport) -> set[str]:
    return {r.layer for r in case.checks if r.check == "gradients"}


@pytest.mark.sweep
def test_no_workload_of_ones_own_raises_a_false_alarm() -> None:
    left_out = {spec.rpartition(":")[2]: why for spec, why in OWN.items()}
    cases = in_ones_own("allreduce", *left_out)
    assert set(cases) == set(left_out)
    for name, case in cases.items():
        assert case.verdict == "pass", name
        assert layers_of(case) == (
            {"bitwise", "rounding"}
            if left_out[name]
            else {"bitwise", "rounding", "full batch float32"}
        )
        assert left_out[name] in " ".join(case.notes)


@pytest.mark.usefixtures("no_rerun")
@pytest.mark.parametrize(
    ("wrong", "name", "layers"),
    [
        ("alone", "Autocast", {"rounding"}),
        ("unweighted", "FrozenStatistics", {"rounding", "full batch float32"}),
    ],
)
def test_mistakes_fail_in_own_workloads(wrong: str, name: str, layers: set[str]) -> None:
    """By R, and by full batch float32 wherever that is required."""
    case = in_ones_own(f"{__name__}:{wrong}", name)[name]
    failed = {r.layer for r in case.checks if r.check == "gradients" and r.verdict == "fail"}
    assert failed == layers_of(case) == layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_who_exchanges_in_every_backward_is_right_and_judged(dtype: str) -> None:
    report = distcheck.verify(
        "tests/explored.py:MeansInEveryBackward", world=3, workload="accumulation", batch=29,
        steps=2, dtype=dtype,
    )  # fmt: skip
    assert_everything_compared(report)
    layers = {r.layer for r in report.cases[0].checks if r.check == "gradients"}
    assert layers == ({"rounding", "full batch float32"} if dtype == "float32" else {"rounding"})


def plain(model):  # type: ignore[no-untyped-def]
    """What people write: every parameter has a gradient."""
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def test_code_that_takes_every_gradient_for_granted_is_told_what_the_cell_is_about() -> None:
    report = distcheck.verify(plain, world=2, workload="unused_parameters", steps=1)
    assert int(report.exit_code) == 4
    (case,) = report.cases
    assert {d.cause for d in case.diagnosis} == {"crash"}
    assert (
        "p.grad is None, on every rank; if your code does not need to support this, pass --without"
        in str(case.notes)
    )


def zeros(model):  # type: ignore[no-untyped-def]
    """Every rank has the same list, because what is absent is zero."""
    import torch

    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    plain(model)


def test_a_gradient_of_zero_is_none_as_long_as_nothing_moves() -> None:
    report = distcheck.verify(zeros, world=2, workload="unused_parameters", steps=2)
    assert_everything_compared(report)
    assert "has a zero gradient, but the single-process" in str(report.cases[0].checks)
