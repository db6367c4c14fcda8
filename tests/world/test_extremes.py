"""Gradients of unusual size: what is right in float32 passes, in whatever order it divides."""

import pytest
import torch.distributed as dist
from torch import nn

import distcheck
from distcheck.contract import BackendAllReduce, Step, strategy
from distcheck.records import Report
from tests.world.test_verify import assert_everything_compared


def sums_and_divides(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


def divides_and_sums(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        parameter.grad *= step.weight / step.world_size
        dist.all_reduce(parameter.grad)


@strategy(order=BackendAllReduce(), scale="divide-before")
def promises_to_divide_first(model: nn.Module, step: Step) -> None:
    sums_and_divides(model, step)


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
def test_both_ways_to_divide_are_right_where_the_sum_overflows(code: str) -> None:
    report = run(code, "huge_gradients", world=3)
    assert_everything_compared(report)
    reasons = [r.reason for r in report.cases[0].checks if (r.check, r.layer) == ("gradients", "R")]
    said = "some sums are beyond the largest number of the dtype" in reasons[0]
    assert said == (code == "sums_and_divides")


def test_who_promises_to_divide_first_may_not_overflow() -> None:
    assert failed(run("promises_to_divide_first", "huge_gradients")) == {"X", "R", "S32"}


@pytest.mark.parametrize("code", ["overflows_at_once", "of_the_other_sign"])
def test_an_infinity_that_no_order_gives_fails(code: str) -> None:
    assert failed(run(code, "huge_gradients")) == {"R", "S32"}


@pytest.mark.sweep
@pytest.mark.parametrize("code", ["sums_and_divides", "divides_and_sums"])
@pytest.mark.parametrize("cell", ["non_finite", "denormal_gradients", "zero_on_some"])
@pytest.mark.parametrize("world", [2, 4, 5])
def test_code_without_a_promise_is_right(code: str, cell: str, world: int) -> None:
    assert_everything_compared(run(code, cell, world))
