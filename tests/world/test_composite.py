"""The composite model under the built-in strategies, and groups and schedules of a workload."""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distcheck
from distcheck.contract import Build, Step, strategy
from tests.world.test_verify import assert_everything_compared

pytestmark = pytest.mark.usefixtures("no_rerun")

SMALL = "tests.mutants.small:InGroups"
BUILT_IN = (
    "allreduce", "ring", "gather_scatter", "reduce_broadcast", "parameter_server", "ddp",
    "ddp_small_buckets", "ddp_bucket_view", "ddp_static_graph", "ddp_find_unused", "ddp_no_sync",
    "ddp_allreduce_hook", "ddp_fp16_hook", "ddp_bf16_hook", "zero1", "fsdp",
)  # fmt: skip
QUICK = ("ddp", "zero1", "fsdp")


@pytest.mark.parametrize("name", QUICK)
def test_it_passes(name: str) -> None:
    """Parameters of 0 to 5 dimensions, buffers, groups: what each of these divides in its way."""
    report = distcheck.verify(name, world=2, workload="composite", dtype="float32", steps=2)
    assert_everything_compared(report)
    (case,) = report.cases
    compared = {(r.check, r.layer): r.compared.tensors for r in case.checks}
    assert compared["gradients", "rounding"] == 73
    assert compared["parameters", "bitwise"] == 146
    assert compared["buffers", "bitwise"] == 8


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("workload", ["composite", "adamw"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_no_false_alarm(name: str, workload: str, world: int) -> None:
    assert_everything_compared(distcheck.verify(name, world=world, workload=workload))


class _Averages:
    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


@strategy(one_group=True)
class OneGroup(_Averages):
    """Its optimizer knows no groups, and takes its settings once for all."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        defaults = build([nn.Parameter(torch.zeros(1))]).defaults
        return torch.optim.SGD(parameters, **{k: defaults[k] for k in ("lr", "momentum")})


class TakesGroupsAsTheyAre(_Averages):
    """No promise: the loop's own groups."""


def test_groups_are_made_unless_a_strategy_has_one() -> None:
    one, several = (
        distcheck.verify(made, world=2, workload=SMALL, dtype="float32", steps=2)
        for made in (OneGroup, TakesGroupsAsTheyAre)
    )
    assert_everything_compared(one)
    assert_everything_compared(several)
    assert any("all parameters in one group" in note for note in one.cases[0].notes)
    assert not any("one group" in note for note in several.cases[0].notes)


@pytest.mark.parametrize("name", ["zero1", "fsdp"])
def test_groups_and_a_schedule_survive_what_divides_the_optimizer(name: str) -> None:
    report = distcheck.verify(name, world=2, workload=SMALL, dtype="float32")
    assert_everything_compared(report)
    assert "parameters" in {r.check for r in report.cases[0].checks}


class MakesSyncBatchNorm(_Averages):
    """What a script for GPUs does to any model; on a CPU such a model does not run."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def test_code_that_synchronizes_statistics_is_not_given_what_it_cannot_train() -> None:
    """The rest of the default run judges it. (Everything in this file counts as such code.)"""
    report = distcheck.verify(
        MakesSyncBatchNorm, world=2, workload=["mlp", "composite"], dtype="float32", steps=1
    )
    assert_everything_compared(report)
    assert {case.case.workload for case in report.cases} == {"mlp"}
    assert "SyncBatchNorm" in " ".join(report.left_out.values())


@pytest.mark.parametrize(
    ("name", "verdict"), [("FusedSteps", "pass"), ("FusedAndCountedTwice", "fail")]
)
def test_a_fused_adamw_in_float64(name: str, verdict: str) -> None:
    report = distcheck.verify(
        f"tests.world.fused:{name}", world=2, workload="composite", dtype="float64", batch=32,
        steps=2,
    )  # fmt: skip
    assert report.verdict == verdict
    if verdict == "pass":
        assert_everything_compared(report)
