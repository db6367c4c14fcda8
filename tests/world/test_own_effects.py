"""What a strategy does to a single process's arithmetic, and may: right code passes, and the same
code with a mistake beside it fails.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distcheck
from distcheck.records import CheckResult

pytestmark = pytest.mark.usefixtures("no_rerun")


def mean(model, step, divisor=0):  # type: ignore[no-untyped-def]
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= divisor or step.world_size


class ChannelsLast:
    """Convolutions choose their kernels by how weights lie in memory."""

    divisor = 0

    def wrap(self, model):  # type: ignore[no-untyped-def]
        return model.to(memory_format=torch.channels_last)

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        mean(model, step, self.divisor)


class ChannelsLastUndivided(ChannelsLast):
    divisor = 1


class Fused:
    """Another implementation of the optimizer, which rounds otherwise."""

    def optimizer(self, build, parameters):  # type: ignore[no-untyped-def]
        built = build(parameters)
        return type(built)([dict(group, fused=True) for group in built.param_groups])

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        mean(model, step)


class FusedAndALittleFaster(Fused):
    """A learning rate that is 1e-4 of itself larger."""

    def optimizer(self, build, parameters):  # type: ignore[no-untyped-def]
        built = super().optimizer(build, parameters)
        for group in built.param_groups:
            group["lr"] *= 1.0001
        return built


class AveragesParameters:
    """Every rank steps by itself, and parameters are averaged after every step."""

    missing = 0

    def optimizer(self, build, parameters):  # type: ignore[no-untyped-def]
        parameters = list(parameters)
        built = build(parameters)
        built.register_step_post_hook(lambda *_: self._average(parameters))
        return built

    def _average(self, parameters):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            for parameter in parameters:
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size() - self.missing

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        """Nothing."""


class AveragesParametersOverTooFew(AveragesParameters):
    missing = 1


def running_mean(model, step):  # type: ignore[no-untyped-def]
    """Divides on the way, by numbers of which 1 / 3 rounds."""
    for parameter in model.parameters():
        found = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(found, parameter.grad)
        so_far = found[0].clone()
        for count, gradient in enumerate(found[1:], 2):
            so_far += (gradient - so_far) / count
        parameter.grad.copy_(so_far)


def running_mean_a_little_off(model, step):  # type: ignore[no-untyped-def]
    """A millionth is more than rounding."""
    running_mean(model, step)
    for parameter in model.parameters():
        parameter.grad *= 1 + 1e-6


def running_mean_that_goes_wrong(model, step):  # type: ignore[no-untyped-def]
    """After it has rounded, rounding excuses nothing else."""
    running_mean(model, step)
    for parameter in model.parameters():
        parameter.grad *= 1 + (step.index == 1)


def _failed(strategy: Any, **asked: Any) -> dict[tuple[str, str], CheckResult]:
    asked = {"world": 2, "workload": "cnn", "dtype": "float32", "steps": 1, "batch": 64, **asked}
    report = distcheck.verify(strategy, **asked)
    (case,) = report.cases
    assert all(r.verdict != "unknown" for r in case.checks)
    return {(r.check, r.layer): r for r in case.checks if r.verdict == "fail"}


class MeanInAStepHook:
    """Has no sync(): the mean is formed in a hook that runs before the optimizer's step."""

    divided = True

    def wrap(self, model):  # type: ignore[no-untyped-def]
        return model

    def optimizer(self, build, parameters):  # type: ignore[no-untyped-def]
        parameters = list(parameters)
        built = build(parameters)
        built.register_step_pre_hook(lambda *_: self._exchange(parameters))
        return built

    def _exchange(self, parameters):  # type: ignore[no-untyped-def]
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            if self.divided:
                parameter.grad /= dist.get_world_size()


class SumInAStepHook(MeanInAStepHook):
    divided = False


def test_gradients_are_final_after_the_hooks_of_an_optimizers_step() -> None:
    assert not _failed(MeanInAStepHook)
    assert set(_failed(SumInAStepHook)) == {
        ("gradients", "rounding"),
        ("gradients", "full batch float32"),
    }


def test_parameters_may_lie_otherwise_in_memory() -> None:
    assert not _failed(ChannelsLast)
    assert set(_failed(ChannelsLastUndivided)) == {
        ("gradients", "rounding"),
        ("gradients", "full batch float32"),
    }


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_file_may_set_the_default_dtype(dtype: str, tmp_path: Path) -> None:
    """The same model begins, also for a strategy that was looked at after it."""
    path, plain = tmp_path / "sets.py", tmp_path / "plain.py"
    code = (
        "import torch.distributed as dist\n"
        "def mean(model, step):\n"
        "    for parameter in model.parameters():\n"
        "        dist.all_reduce(parameter.grad)\n"
        "        parameter.grad /= step.world_size\n"
    )
    plain.write_text(code)
    path.write_text(f"import torch\ntorch.set_default_dtype(torch.{dtype})\n{code}")
    report = distcheck.verify(
        [f"{path}:mean", f"{plain}:mean"], world=2, workload="cnn", dtype="float32", steps=1
    )
    report.raise_for_verdict()


def test_an_optimizer_may_be_a_fused_one() -> None:
    assert not _failed(Fused, steps=3)
    assert set(_failed(FusedAndALittleFaster, steps=3)) == {("parameters", "bitwise")}


def test_parameters_may_be_averaged_after_every_step_where_that_is_accepted() -> None:
    asked = {
        "accept": "local-sgd:1", "steps": 2, "world": 3, "workload": "tests.mutants.small:Small",
    }  # fmt: skip
    assert not _failed(AveragesParameters, **asked)
    found = _failed(AveragesParametersOverTooFew, **asked)
    assert set(found) == {("parameters", "rounding")}
    report = distcheck.verify(ChannelsLast, dtype="float32", batch=64, **asked)
    assert report.verdict == "fail", "what averages gradients averages no parameters"


def test_a_mean_may_round_on_the_way() -> None:
    report = distcheck.verify(running_mean, world=4, workload="exact", steps=3)
    report.raise_for_verdict()
    (case,) = report.cases
    (found,) = [r for r in case.checks if (r.check, r.layer) == ("gradients", "exact")]
    assert found.reason.count("sums are rounded, within the bound of rounding") == 1


def test_rounding_on_the_way_excuses_nothing_else() -> None:
    asked = {"world": 4, "workload": "exact", "batch": 256}
    off = _failed(running_mean_a_little_off, **asked)
    assert off[("gradients", "exact")].first.step == 0  # type: ignore[union-attr]
    later = _failed(running_mean_that_goes_wrong, steps=2, **asked)
    assert set(later) == {("gradients", "exact")}
    (found,) = later.values()
    assert found.first is not None
    assert found.first.step == 1
    assert "sums are rounded" not in found.reason
