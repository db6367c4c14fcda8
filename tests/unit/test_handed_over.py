"""What code in its own form is handed, what it keeps, and what is taken back of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.training.adapters.forms.wrapper import ModuleAroundWrapper
from distcheck.training.adapters.options import adaptation_of
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import load_strategy


def loaded(tmp_path: Path, source: str, name: str = "f", **said: Any) -> LoadedStrategy:
    """From a file of its own, as a rank loads it."""
    file = tmp_path / f"loaded_{abs(hash(source))}.py"
    file.write_text(source)
    return load_strategy(f"{file}:{name}", adaptation_of(**said))


def run(strategy: LoadedStrategy, *, steps: int = 1) -> nn.Module:
    """A model, trained for some steps on this rank alone; gradients are 1 before the sync."""
    model = strategy.wrap(nn.Linear(2, 3))
    for index in range(steps):
        step = Step(index=index, rank=0, world_size=1, samples=1, total_samples=1)
        model.zero_grad()
        strategy.scale_loss(
            sum((p.sum() for p in model.parameters()), torch.zeros(())), step
        ).backward()
        strategy.sync(model, step)
    return model


def gradients(model: nn.Module) -> set[float]:
    return {float(value) for p in model.parameters() for value in p.grad.flatten()}  # type: ignore[union-attr]


ADDS_UP = """
def f({takes}):
    for i, p in enumerate(model.parameters()):
        {kept}[i] = {kept}.get(i, 0) + p.grad
        p.grad = {kept}[i].clone()
"""


@pytest.mark.parametrize(
    ("takes", "kept", "said"),
    [
        ("model", "pending", {"variables": {"pending": {}}}),
        ("model, pending", "pending", {"arguments": {"pending": {}}}),
        ("model, **more", "more['pending']", {"arguments": {"pending": {}}}),
    ],
    ids=["module", "parameter", "any-name"],
)
def test_attributes_are_kept(tmp_path: Path, takes: str, kept: str, said: dict[str, Any]) -> None:
    """And is new where the code is loaded again, as after a resume."""
    source = ADDS_UP.format(takes=takes, kept=kept)
    assert gradients(run(loaded(tmp_path, source, **said), steps=3)) == {3.0}
    assert gradients(run(loaded(tmp_path, source, **said), steps=2)) == {2.0}


def test_what_changes_in_training_is_published_anew(tmp_path: Path) -> None:
    source = "def f(model):\n    for p in model.parameters(): p.grad += STEP\n"
    strategy = loaded(tmp_path, source, variables={"STEP": "@iteration"})
    assert gradients(run(strategy, steps=3)) == {3.0}


def test_an_object_keeps_what_its_method_puts_into_what_was_said(tmp_path: Path) -> None:
    source = """
class Agent:
    def __init__(self, observations): raise AssertionError
    def sync(self):
        for i, p in enumerate(self.model.parameters()):
            self.kept[i] = self.kept.get(i, 0) + p.grad
            p.grad = self.kept[i].clone()
"""
    strategy = loaded(tmp_path, source, "Agent.sync", arguments={"self.kept": {}})
    assert gradients(run(strategy, steps=3)) == {3.0}


def test_a_collective_gets_the_gradient_itself(tmp_path: Path) -> None:
    """A copy that is contiguous is the code's to lose."""
    source = "def f(tensor):\n    c = tensor.contiguous()\n    c *= 2\n"
    strategy = loaded(tmp_path, source)
    model = nn.Linear(2, 3, bias=False)
    strategy.wrap(model)
    for gradient, after in ((torch.ones(3, 2), 2.0), (torch.ones(2, 3).T, 1.0)):
        model.weight.grad = gradient
        strategy.sync(model, Step(index=0, rank=0, world_size=1, samples=1, total_samples=1))
        assert gradients(model) == {after}


def test_a_collective_that_receives_is_taken_back_whatever_the_layout(tmp_path: Path) -> None:
    strategy = loaded(tmp_path, "def f(send, recv):\n    recv.copy_(send * 2)\n")
    model = nn.Linear(2, 3, bias=False)
    strategy.wrap(model)
    model.weight.grad = torch.arange(6.0).view(2, 3).T
    strategy.sync(model, Step(index=0, rank=0, world_size=1, samples=1, total_samples=1))
    assert torch.equal(model.weight.grad, 2 * torch.arange(6.0).view(2, 3).T)


TWICE = """
def f({takes}):
    for p in params: p.grad *= 4
    for p in params: p.grad /= 2
"""


@pytest.mark.parametrize(
    ("source", "said", "left"),
    [
        (TWICE.format(takes="params"), {}, 4.0),
        (TWICE.format(takes="params, *, scale=1"), {}, 4.0),
        (TWICE.format(takes="params: 'Iterable[nn.Parameter]'"), {}, 4.0),
        (TWICE.format(takes="params: list"), {}, 2.0),
        (TWICE.format(takes="params: 'Sequence[nn.Parameter]'"), {}, 2.0),
        (TWICE.format(takes="param_list").replace("params", "param_list"), {}, 2.0),
        (TWICE.format(takes="params") + "    len(params)\n", {}, 2.0),
        (TWICE.format(takes="params") + "    params[0]\n", {}, 2.0),
        (TWICE.format(takes="params"), {"arguments": {"params": "@param_list"}}, 2.0),
        (TWICE.format(takes="optimizer, params"), {"arguments": {"optimizer": 0}}, 4.0),
    ],
)
def test_call_conventions(tmp_path: Path, source: str, said: dict[str, Any], left: float) -> None:
    strategy = loaded(tmp_path, source, **said)
    assert gradients(run(strategy)) == {left}
    assert ("model.parameters(), a generator" in strategy.note) == (left == 4.0)


HELPER = "def install(model, w=1):\n    for p in model.parameters(): add(p)\n"
HELPER += "def add(p): p.register_hook(len)\n"


@pytest.mark.parametrize(
    "last",
    [
        "f = install",
        "f = lambda model: install(model)",
        "class C:\n  __call__ = lambda self, model: install(model)\nf = C()",
    ],
    ids=["helper", "lambda", "object"],
)
def test_hooks_that_no_source_shows_are_refused_after_backward(tmp_path: Path, last: str) -> None:
    strategy = loaded(tmp_path, f"{HELPER}{last}\n")
    with pytest.raises(UsageError, match=r"registers hooks, .* pass --as hooks"):
        run(strategy)


def test_a_partial_is_what_it_calls(tmp_path: Path) -> None:
    source = (
        "import functools\ndef install(model, w):\n"
        "    for p in model.parameters(): p.register_hook(lambda g: g * w * TWO)\n"
        "f = functools.partial(install, w=2)\n"
    )
    strategy = loaded(tmp_path, source, variables={"TWO": 2})
    assert strategy.note.startswith("taken as: hooks")
    assert gradients(run(strategy)) == {4.0}
    with pytest.raises(UsageError, match="uses THREE, which its module does not define"):
        run(loaded(tmp_path, source.replace("TWO", "THREE")))


def test_names_that_a_callable_object_lacks_are_missed(tmp_path: Path) -> None:
    source = "class C:\n  def __call__(self, model): model.weight.grad *= TWO\nf = C()\n"
    with pytest.raises(UsageError, match="uses TWO, which its module does not define"):
        run(loaded(tmp_path, source))


@pytest.mark.parametrize(
    ("takes", "made"),
    [
        ("model", "[p.grad * 2 for p in model.parameters()]"),
        ("model", "tuple(p.grad * 2 for p in model.parameters())"),
        ("model", "{n: p.grad * 2 for n, p in model.named_parameters()}"),
        ("params", "[p.grad * 2 for p in params]"),
    ],
)
def test_gradients_that_are_returned_are_taken(tmp_path: Path, takes: str, made: str) -> None:
    strategy = loaded(tmp_path, f"def f({takes}):\n    return {made}\n")
    assert gradients(run(strategy, steps=2)) == {2.0}


@pytest.mark.parametrize(
    "returned",
    ["list(model.parameters())", "[p.data for p in model.parameters()]", "[1, 2]", "[]", "model"],
)
def test_what_else_is_returned_is_left_alone(tmp_path: Path, returned: str) -> None:
    strategy = loaded(tmp_path, f"def f(model):\n    return {returned}\n")
    assert gradients(run(strategy, steps=2)) == {1.0}


def test_a_namespace_sets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after the first, from which on it is the same object."""
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "gloo")
    source = "def f(model, args):\n    model.weight.grad *= args.now + 2\n"
    strategy = loaded(tmp_path, source, arguments={"args.now": "@iteration"})
    assert gradients(run(strategy, steps=4)) == {1.0, 5.0}


def test_what_is_returned_beside_gradients_in_place_is_something_else(tmp_path: Path) -> None:
    """What is left over for the next step, or the buffers that were sent."""
    strategy = loaded(
        tmp_path, "def f(model):\n    return [p.grad.mul_(2) / 2 for p in model.parameters()]\n"
    )
    assert gradients(run(strategy)) == {2.0}


def test_a_list_that_an_object_keeps_is_one(tmp_path: Path) -> None:
    source = "class A:\n  def __init__(self, x): pass\n"
    source += "  def sync(self):\n    for i in range(len(self.params)): self.params[i].grad *= 2\n"
    assert gradients(run(loaded(tmp_path, source, "A.sync"))) == {2.0}


def test_an_optimizers_class_is_called_as_one(tmp_path: Path) -> None:
    strategy = loaded(tmp_path, "import torch\nclass f(torch.optim.SGD): pass\n")
    assert strategy.note.startswith("taken as: own-optimizer")


def test_a_wrapper_that_is_no_module_keeps_what_the_loop_asks_for() -> None:
    class Plain:
        on = True

        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __call__(self, inputs: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
            return self.module(inputs) * (2 if twice else 1)

        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            self.on = False
            yield
            self.on = True

    model = nn.Linear(2, 3)
    made = Plain(model)
    carrier = ModuleAroundWrapper(model, made, made)
    once, twice = carrier(torch.ones(2)), carrier(torch.ones(2), twice=True)
    assert torch.equal(2 * once, twice)
    with carrier.no_sync():  # type: ignore[operator]
        assert not made.on
    assert made.on


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(model, step: int): model.bias.grad *= step + 2", "f"),
        ("def f(model, step: 'int'): model.bias.grad *= step + 2", "f"),
        ("class f:\n  def sync(self, model, step: int): model.bias.grad *= step + 2", "f"),
        ("class f:\n  def sync(self, model, when): model.bias.grad *= when.index + 2", "f"),
        ("def f(model, step): model.bias.grad *= step.index + 2", "f"),
    ],
)
def test_a_step_that_is_a_number_is_the_index(tmp_path: Path, source: str, name: str) -> None:
    strategy = loaded(tmp_path, source, name)
    assert gradients(run(strategy, steps=2)) == {1.0, 3.0}


def test_a_method_that_asks_for_something_else_than_the_step_is_refused(tmp_path: Path) -> None:
    source = "class f:\n  def sync(self, model, world_size): pass\n"
    with pytest.raises(UsageError, match=r"would be the step and not world_size.*:f\.sync$"):
        loaded(tmp_path, source)
