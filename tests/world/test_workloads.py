"""Workloads of people's own, in the forms that their code has, raise no alarm."""

import random
from collections.abc import Iterable

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import distcheck
from distcheck.errors import UsageError
from distcheck.records import CaseReport
from distcheck.workloads.cells.samples import FEATURES, CellWorkload
from tests.world.test_verify import assert_everything_compared

pytestmark = pytest.mark.usefixtures("no_rerun")


def passed(workload: type, strategy: str, *, steps: int = 2) -> CaseReport:
    """The report on a workload that is right, and has to be found so."""
    spec = f"{__name__}:{workload.__name__}"
    report = distcheck.verify(strategy, world=2, workload=spec, batch=16, steps=steps)
    assert_everything_compared(report)
    return report.cases[0]


def layers(case: CaseReport, check: str) -> set[str]:
    """The layers by which a check judged it."""
    return {result.layer for result in case.checks if result.check == check}


class Conjugates(CellWorkload):
    """A complex product whose gradient torch only marks as conjugated."""

    own_dtypes = True

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(FEATURES, 8, dtype=torch.complex64) / 16)
                self.out = nn.Linear(16, 4)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                hidden = inputs.flatten(1).to(torch.complex64) @ self.weight.conj()
                answer: torch.Tensor = self.out(torch.view_as_real(hidden).flatten(1).tanh())
                return answer

        return Model()


def test_gradients_that_are_marked_as_conjugates() -> None:
    assert layers(passed(Conjugates, "ddp"), "gradients") == {
        "bitwise", "rounding", "full batch float32",
    }  # fmt: skip


class LayerDrop(CellWorkload):
    """Each rank skips a layer or not, and scales another, by the generators of libraries."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 4)
                self.between = nn.Linear(8, 8)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                hidden = self.first(inputs.flatten(1)).tanh()
                keep = float(random.random() < 0.5)
                hidden = hidden + keep * self.between(hidden).tanh()
                answer: torch.Tensor = self.last(hidden * numpy.random.normal())
                return answer

        return Model()


def test_what_a_forward_pass_draws_from_libraries_is_drawn_again() -> None:
    case = passed(LayerDrop, "allreduce")
    assert layers(case, "gradients") == {"bitwise", "rounding"}
    reasons = [result.reason for result in case.checks if result.check == "gradients"]
    assert "the forward pass draws random numbers" in str(reasons)


class Unfreezes(CellWorkload):
    """A layer that begins to train at step 1, with a momentum of its own from then on."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4))
        model[1].requires_grad_(False)
        return model

    def before_step(self, model: nn.Module, step: int) -> None:
        assert isinstance(model, nn.Sequential)
        model[1].requires_grad_(step >= 1)


def test_what_was_built_frozen_trains_later() -> None:
    found = {(r.check, r.layer): r.compared for r in passed(Unfreezes, "allreduce", steps=3).checks}
    assert found["local gradients", "bitwise"].tensors == 4
    assert found["parameters", "bitwise"].tensors == 8
    assert found["gradients", "bitwise"].ranks == 2


def test_ddp_leaves_out_what_was_frozen_when_it_was_built() -> None:
    spec = f"{__name__}:Unfreezes"
    report = distcheck.verify("ddp", world=2, workload=spec, batch=16, steps=2)
    assert {d.cause for d in report.cases[0].diagnosis} == {"partial-sync"}
    failed = {r.check for r in report.cases[0].checks if r.verdict == "fail"}
    assert "local gradients" not in failed


class SmallIntegers(CellWorkload):
    """Buffers in dtypes that no layer of torch's has."""

    own_dtypes = True
    dtypes: tuple[torch.dtype, ...] = (torch.uint16, torch.uint32, torch.float8_e4m3fn)

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 4))
        for dtype in self.dtypes:
            name = str(dtype).removeprefix("torch.")
            model.register_buffer(name, torch.ones(3, dtype=torch.uint8).to(dtype))
        return model


class Packed(SmallIntegers):
    """A buffer of elements that torch does not copy."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        model = super().model(sample_shape=sample_shape, classes=classes)
        model.register_buffer("packed", torch.zeros(3, dtype=torch.uint8).view(torch.bits8))
        return model


def test_buffers_of_rare_dtypes() -> None:
    assert layers(passed(SmallIntegers, "allreduce", steps=1), "buffers") == {"bitwise"}


def test_what_cannot_be_recorded_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="Packed: packed is of dtype bits8, which is not"):
        distcheck.verify("allreduce", world=2, workload=f"{__name__}:Packed", batch=16)


class WarmsUp(torch.optim.SGD):
    """Counts steps in its groups, and in Python numbers of its parameters."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                parameter.mul_(1 - 1e-3 / state["count"])
            group["lr"] = 0.05 * min(1.0, group["k"] / 4)
        super().step()


class Forgets(torch.optim.SGD):
    """Counts steps where nobody finds it."""

    steps = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.steps
        super().step()


class Linear(CellWorkload):
    """One layer."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 4))


class WarmedUp(Linear):
    """Its optimizer keeps numbers."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return WarmsUp(parameters, lr=0.05, momentum=0.9)


class Forgotten(Linear):
    """Its optimizer keeps what cannot be put back."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Forgets(parameters, lr=0.05)


class Sparse(Linear):
    """Its optimizer takes no dense gradients."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(parameters)


@pytest.mark.parametrize("strategy", ["allreduce", "zero1"])
def test_numbers_that_an_optimizer_keeps_are_put_back(strategy: str) -> None:
    case = passed(WarmedUp, strategy, steps=3)
    (updates,) = [result for result in case.checks if result.check == "parameters"]
    # Two parameters with a momentum and a count each, and the groups' k and lr.
    assert updates.compared.tensors == 2 + 4 + 2


def test_numbers_that_an_optimizer_keeps_are_owed_as_well() -> None:
    spec = f"{__name__}:WarmedUp"
    report = distcheck.verify(f"{__name__}:Hurries", world=2, workload=spec, batch=16, steps=2)
    failed = {result.check: result for result in report.cases[0].checks if result.verdict == "fail"}
    assert set(failed) == {"parameters"}
    assert "param_groups[0]/k" in str(failed["parameters"])


class Hurries:
    """Right gradients, and an optimizer that counts twice."""

    def optimizer(self, build, parameters):  # type: ignore[no-untyped-def]
        optimizer = build(parameters)
        optimizer.register_step_post_hook(self.hurry)
        return optimizer

    @staticmethod
    def hurry(optimizer, arguments, keywords) -> None:  # type: ignore[no-untyped-def]
        optimizer.param_groups[0]["k"] += 1

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(2)


def test_a_step_that_cannot_be_repeated_is_not_owed_and_that_is_said() -> None:
    case = passed(Forgotten, "allreduce")
    assert layers(case, "parameters") == set()
    assert layers(case, "gradients") == {"bitwise", "rounding", "full batch float32"}
    assert "so its step is not checked" in str(case.notes)
    with pytest.raises(UsageError, match="--accept local-sgd:2 is judged by each rank's local"):
        distcheck.verify(
            "tests.correct:flat_buffer", world=2, workload=f"{__name__}:Forgotten", batch=16,
            steps=4, accept="local-sgd:2",
        )  # fmt: skip


def test_an_optimizer_without_dense_gradients_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        UsageError, match="Sparse: SparseAdam does not step with only dense gradients"
    ):
        distcheck.verify("allreduce", world=2, workload=f"{__name__}:Sparse", batch=16)
