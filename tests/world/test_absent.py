"""The default run where some ranks have no gradient: silent mistakes count, errors do not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Step
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request
from distcheck.records import Case, Report
from distcheck.verification.run import RunOptions, verify_cases
from distcheck.verification.session import NOT_FINISHED, SilentListener
from tests.world.test_verify import assert_everything_compared


class Heard(SilentListener):
    """What a run has said of each case, by workload."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def finished(self, case: Case, verdict: str) -> None:
        self.of[case.workload] = verdict


def judged(code: object, listener: SilentListener | None = None) -> Report:
    """Workload `exact` and the cell of a default run at world 3."""
    spec = f"{__name__}:{code.__qualname__}"  # type: ignore[attr-defined]
    cases = plan_cases(Request(strategies=(spec,), worlds=(3,)))
    wanted = [c for c in cases if c.workload in ("exact", "absent_on_some")]
    return verify_cases(wanted, RunOptions(listener=listener))


def _mean(gradient: torch.Tensor, step: Step) -> None:
    gradient.mul_(step.weight)
    dist.all_reduce(gradient)
    gradient.div_(step.world_size)


def what_there_is(model: nn.Module, step: Step) -> None:
    """As most code has it: a rank without a gradient calls no collective for it."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            _mean(parameter.grad, step)


def takes_none_for_a_tensor(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        _mean(parameter.grad, step)


class WaitsForEveryGradient:
    """DDP as it is by default."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * step.weight


class WaitsForever:
    """Ranks that lack a gradient wait for a message that no rank sends."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if any(p.grad is None for p in model.parameters()):
            dist.recv(torch.zeros(1), src=(step.rank + 1) % step.world_size)
        what_there_is(model, step)


@pytest.mark.parametrize(
    "code",
    [
        what_there_is,
        *(
            pytest.param(code, marks=pytest.mark.sweep)
            for code in (takes_none_for_a_tensor, WaitsForEveryGradient, WaitsForever)
        ),
    ],
)
def test_code_that_ends_with_an_error_there_passes_with_a_remark(code: object) -> None:
    heard = Heard()
    report = judged(code, heard)
    (exact,) = report.cases
    assert report.verdict == "pass"
    assert heard.of == {"exact": "pass", "absent_on_some": NOT_FINISHED}
    assert report.exit_code == 0
    assert [name.endswith("absent_on_some-float32") for name in report.left_out] == [True]
    assert any("--workload absent_on_some to require it" in note for note in exact.notes)
    assert any("absent on some ranks" in line for line in report.not_shown)


class LooksForUnused:
    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, find_unused_parameters=True)

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * step.weight


def fills_in_zeros(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        _mean(parameter.grad, step)


@pytest.mark.parametrize(
    "code", [LooksForUnused, pytest.param(fills_in_zeros, marks=pytest.mark.sweep)]
)
def test_code_that_takes_account_of_it_is_judged_by_it(code: object) -> None:
    report = judged(code)
    assert_everything_compared(report)
    assert [case.case.workload for case in report.cases] == ["exact", "absent_on_some"]
    assert not any("absent on some ranks" in line for line in report.not_shown)


def sends_zeros_and_keeps_none(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        _mean(gradient, step)


def test_wrong_gradients_that_no_error_shows_fail() -> None:
    report = judged(sends_zeros_and_keeps_none)
    assert {c.case.workload: c.verdict for c in report.cases} == {
        "exact": "pass",
        "absent_on_some": "fail",
    }
    assert any("pass --without absent_on_some" in note for note in report.cases[1].notes)
