"""Gradients of unusual size: what is right in float32 passes, in whatever order it divides."""

import pytest
import torch.distributed as dist
from torch import nn

import distcheck
from distcheck.contract import Step
from distcheck.records import Report
from tests.world.test_verify import assert_everything_compared

pytestmark = pytest.mark.usefixtures("no_rerun")


def sums_and_divides(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


def divides_and_sums(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        parameter.grad *= step.weight / step.world_size
        dist.all_reduce(parameter.grad)


def overflows_at_once(model: nn.Module, step: Step) -> None:
    """1e30 is not near the largest number; here it is."""
    for parameter in model.parameters():
        is_large = parameter.grad.abs() > 1e25
        parameter.grad[is_large] *= 1e30
    sums_and_divides(model, step)


def of_the_other_sign(model: nn.Module, step: Step) -> None:
    sums_and_divides(model, step)
    for parameter in model.parameters():
        parameter.grad[parameter.grad.isinf()] *= -1


def run(code: str, cell: str, world: int = 2) -> Report:
    return distcheck.verify(f"{__name__}:{code}", world=world, workload=cell, separate=False)


def failed(report: Report) -> set[str]:
    (case,) = report.cases
    return {r.layer for r in case.checks if (r.check, r.verdict) == ("gradients", "fail")}


@pytest.mark.parametrize("code", ["sums_and_divides", "divides_and_sums"])
def test_both_ways_to_divide_are_right(code: str) -> None:
    assert_everything_compared(run(code, "huge_gradients", world=3))


def test_a_sum_that_overflows_fails() -> None:
    assert failed(run("overflows_at_once", "huge_gradients")) == {"rounding", "full batch float32"}


def test_an_infinity_of_the_other_sign_fails() -> None:
    assert failed(run("of_the_other_sign", "non_finite")) == {"rounding", "full batch float32"}


@pytest.mark.sweep
@pytest.mark.parametrize("code", ["sums_and_divides", "divides_and_sums"])
@pytest.mark.parametrize("cell", ["non_finite", "denormal_gradients", "zero_on_some"])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_code_without_a_promise_is_right(code: str, cell: str, world: int) -> None:
    assert_everything_compared(run(code, cell, world))
