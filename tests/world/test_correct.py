"""Correct code that has never heard of distcheck raises no alarm."""

import pytest
import torch.distributed as dist

import distcheck
from tests.correct import FORMS

pytestmark = pytest.mark.usefixtures("no_rerun")


@pytest.mark.parametrize(
    "workloads",
    [
        ["tests.mutants.small:Small"],
        pytest.param(["exact", "mlp", "cnn"], marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_correct_code_without_a_promise_passes(workloads: list[str]) -> None:
    """In float32; the sweep adds float64, worlds and seeds."""
    specs = [f"tests.correct:{form}" for form in FORMS]
    report = distcheck.verify(specs, world=3, workload=workloads, dtype="float32", steps=3)
    assert len(report.raise_for_verdict().cases) == len(FORMS) * len(workloads)


@pytest.mark.parametrize("form", ["flat_buffer", "AllReduceHook"])
def test_running_statistics_may_be_local_or_rank_0s(form: str) -> None:
    workload = "tests.mutants.workloads:Normalized"
    distcheck.verify(f"tests.correct:{form}", world=3, workload=workload).raise_for_verdict()


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(10))
def test_correct_code_passes_at_more_worlds_and_seeds(form: str, seed: int) -> None:
    distcheck.verify(f"tests.correct:{form}", world=[2, 3, 4, 5], seed=seed).raise_for_verdict()


class AveragesBuffers:
    """Gradients and running statistics are averaged, which is one design of several."""

    divisor = 1.0

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        for parameter in model.parameters():
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(step.world_size * self.divisor)


class AveragesBuffersWrong(AveragesBuffers):
    """By a millionth."""

    divisor = 1.000001


def test_running_statistics_may_be_averaged() -> None:
    asked = {"world": 3, "workload": "tests.mutants.workloads:Normalized", "steps": 2}
    right = distcheck.verify(AveragesBuffers, **asked).raise_for_verdict()
    (buffers,) = [r for r in right.cases[0].checks if r.check == "buffers"]
    assert "averaged over the ranks" in buffers.reason
    wrong = distcheck.verify(AveragesBuffersWrong, **asked)
    assert [r.check for r in wrong.cases[0].checks if r.verdict == "fail"] == ["buffers"]
