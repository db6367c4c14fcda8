"""`--as engine`, with engines written here: nothing else need be installed."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import distcheck
from distcheck.errors import CannotRunError, UsageError
from distcheck.training.loading import load_strategy, missing_package_error
from distcheck.worlds.messages import SETTING_UP, Progress
from distcheck.worlds.stalls import SETTING_UP_S, StallWatch
from tests.world.test_verify import assert_everything_compared

pytestmark = pytest.mark.usefixtures("no_rerun")

SMALL = "tests.mutants.small:Small"


class Engine:
    """A small one around DDP, which keeps nothing to itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.optimizer = DistributedDataParallel(model), optimizer

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Engine, object]:
    """As DeepSpeed does, a tuple that begins with the engine."""
    return Engine(model, optimizer), optimizer


class Silent(Engine):
    """Its accessor returns nothing of one parameter."""

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        named = list(self.inner.module.named_parameters())
        return {name: p.grad for name, p in named[1:]} | {named[0][0]: None}


class SaysNothing(Engine):
    def full_parameters(self) -> None:
        return None


class PutsTogether(Engine):
    """All that is recorded comes from accessors."""

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(self.inner.module.named_parameters())

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self._named().items()}

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: p.grad for name, p in self._named().items()}

    def full_state(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state
        key = "momentum_buffer"
        return {f"{name}/{key}": state[p][key] for name, p in self._named().items() if state[p]}


class StepsTwice(Engine):
    def step(self) -> None:
        super().step()
        super().step()


def verify(name: str, **asked: object) -> distcheck.records.Report:
    given = {"world": 2, "workload": SMALL, "dtype": "float32", "steps": 2, "form": "engine"}
    return distcheck.verify(f"{__name__}:{name}", **(given | asked))  # type: ignore[arg-type]


def test_a_right_engine_passes_and_accumulates() -> None:
    assert load_strategy(f"{__name__}:initialize").engine, "its set-up has a deadline of its own"
    report = verify("initialize", workload=[SMALL, "accumulation", "loss_scaling", "clipping"])
    assert_everything_compared(report)
    assert len(report.cases) == 4
    assert "taken as: engine" in report.cases[0].notes[0]


@pytest.mark.parametrize(
    ("name", "check"), [("Silent", "gradients"), ("SaysNothing", "parameters")]
)
def test_an_accessor_that_returns_nothing_makes_no_pass(name: str, check: str) -> None:
    (case,) = verify(name).cases
    assert case.verdict == "unknown", case.diagnosis
    assert check in {result.check for result in case.checks if result.verdict == "unknown"}


def test_agreement_is_no_pass_of_what_an_engine_puts_together() -> None:
    (case,) = verify("PutsTogether").cases
    assert case.verdict == "pass"
    assert "agreement" not in {result.check for result in case.checks}
    assert any(note.startswith("agreement cannot be checked") for note in case.notes)
    (part,) = [r for r in verify("Silent").cases[0].checks if r.check == "agreement"]
    assert "of kind gradient)" in part.reason
    assert part.compared.elements > 0
    assert part.insensitive.elements > 0


def test_an_engine_that_steps_twice_is_named() -> None:
    (case,) = verify("StepsTwice").cases
    assert {found.cause for found in case.diagnosis} == {"wrong-update"}


def half(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """A module, which has no backward."""
    return model


def missing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As where a library is imported when it is needed."""
    raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed.utils")


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"returned a Sequential without backward, step; expected"):
        verify("half")
    with pytest.raises(CannotRunError, match="deepspeed is not installed here; run pip install"):
        verify("missing")


def test_a_missing_import_has_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)  # as where it is not installed
    (tmp_path / "needs_megatron.py").write_text("import megatron.core\n")
    with pytest.raises(CannotRunError, match="run pip install megatron-core"):
        load_strategy(f"{tmp_path / 'needs_megatron.py'}:initialize")


def test_a_library_that_is_not_an_engines_has_no_pip_line() -> None:
    assert (
        missing_package_error(ModuleNotFoundError("No module named 'nothing'", name="nothing"))
        is None
    )


class Rank:
    """What a watch asks of a child."""

    known_at, progress_count, busy_seconds, starting, is_awake = float("inf"), 1, 0.0, False, False

    def __init__(self, phase: str) -> None:
        self.progress = Progress(0, phase)


@pytest.mark.parametrize(("phase", "allowed_s"), [("build", 30.0), (SETTING_UP, SETTING_UP_S)])
def test_setting_up_has_a_deadline_of_its_own(phase: str, allowed_s: float) -> None:
    watch, ranks, now = StallWatch(30.0, 0.0), [Rank(phase)], 0.0
    while not watch.look(ranks, now):  # type: ignore[arg-type]
        now += 0.5
        assert now < 2 * SETTING_UP_S
    assert abs(now - allowed_s) <= 1.0
