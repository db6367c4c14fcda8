"""Which form code is taken for, what is filled in, and what is said of options."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distcheck import plan
from distcheck.adapters import choose_form, form_names, load_form
from distcheck.adapters.asked import adaptation_of
from distcheck.adapters.forms.wrapper import Carrier
from distcheck.adapters.gradients import Stillness
from distcheck.adapters.scene import Filling, Scene
from distcheck.adapters.target import Target
from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.loading import LoadedStrategy, load_strategy
from distcheck.records import Adaptation, Case


def target_of(folder: Path, source: str, name: str = "f") -> Target:
    namespace: dict[str, object] = {}
    file = folder / "code.py"
    file.write_text(source)
    exec(compile(source, str(file), "exec"), namespace)
    head, _, tail = name.partition(".")
    found = namespace[head]
    owner = found if tail and isinstance(found, type) else None
    return Target(f"code.py:{name}", getattr(found, tail) if tail else found, owner, None)


@pytest.mark.parametrize(
    ("source", "name", "form"),
    [
        ("def f(model): pass", "f", "model"),
        ("def f(whatever): pass", "f", "model"),
        ("def f(model, step): pass", "f", "model"),
        ("def f(rank, world_size, net): pass", "f", "model"),
        ("def f(optimizer): pass", "f", "model"),
        ("def f(comm, model): pass", "f", "model"),
        ("def f(params): pass", "f", "parameters"),
        ("def f(comm, grads): pass", "f", "gradients"),
        ("def f(grads, size): pass", "f", "gradients"),
        ("def f(tensors): pass", "f", "gradients"),
        ("class f:\n  def __init__(self, x: 'list[nn.Parameter]'): pass", "f", ""),
        ("class f:\n  def __init__(self, x: 'list[torch.Tensor]'): pass", "f", ""),
        ("import torch\nclass f(torch.optim.SGD): pass", "f", ""),
        ("def f(tensor): pass", "f", "tensor-mean"),
        ("def f(send, recv): pass", "f", "tensor-mean"),
        ("def f(x: 'torch.Tensor'): pass", "f", "tensor-mean"),
        ("def f(x: 'nn.Module'): pass", "f", "model"),
        ("def f(x: 'list[torch.Tensor]'): pass", "f", "gradients"),
        ("def f(x: 'Iterable[nn.Parameter]'): pass", "f", "parameters"),
        ("def f(state, bucket): pass", "f", "comm-hook"),
        ("def f(process_group, b: 'dist.GradBucket'): pass", "f", "comm-hook"),
        ("def f(model, optimizer): optimizer.step()", "f", "step"),
        ("def f(model, lr):\n  for p in model: p.data -= lr * p.grad", "f", "steps-inside"),
        ("def f(params, lr):\n  for p in params: p.data.sub_(p.grad)", "f", "steps-inside"),
        ("def f(model, lr):\n  for p in model: p.grad.data -= 1", "f", "model"),
        ("def f(model, lr):\n  for p in model: p.data += lr", "f", "model"),
        ("class f:\n  def __init__(self, module): pass", "f", "wrapper"),
        ("class f:\n  def __init__(self, optimizer): pass", "f", "optimizer"),
        ("class f:\n  def __init__(self, params, optimizer_cls): pass", "f", "sharded-optimizer"),
        ("class f:\n  def __init__(self, x): pass\n  def g(self): pass", "f.g", "method"),
        ("class f:\n  def __init__(self, model): pass\n  def g(self): pass", "f.g", "wrapper"),
        ("class f:\n  def wrap(self, model): pass", "f", "strategy"),
        ("class f:\n  pass", "f", ""),
        ("f = 3", "f", ""),
    ],
)
def test_forms_are_chosen_by_the_signature(
    tmp_path: Path, source: str, name: str, form: str
) -> None:
    assert choose_form(target_of(tmp_path, source, name)) == form


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("async def f(model): pass", "a coroutine"),
        ("def f(model): yield", "a generator"),
        ("async def f(model): yield", "an asynchronous generator"),
    ],
)
def test_what_a_call_does_not_run_is_refused(tmp_path: Path, source: str, kind: str) -> None:
    (tmp_path / "deferred.py").write_text(source)
    with pytest.raises(UsageError, match=f" is {kind}, of which a call runs nothing"):
        load_strategy(f"{tmp_path}/deferred.py:f")


def written(tmp_path: Path, source: str) -> Target:
    """From a file, so that its source can be read."""
    name = f"source_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    sys.path.insert(0, str(tmp_path))
    try:
        module = __import__(name)
    finally:
        sys.path.remove(str(tmp_path))
    return Target(f"{name}:f", module.f, None, module)


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ("for p in x.parameters(): p.grad", "model"),
        ("for g in x.param_groups: pass", "model"),
        ("x.register_full_backward_hook(len)", "hooks"),
        ("for p in x.parameters(): p.register_hook(len)", "hooks"),
    ],
)
def test_the_use_of_a_parameter_outweighs_its_name(tmp_path: Path, body: str, form: str) -> None:
    assert choose_form(written(tmp_path, f"def f(x):\n    {body}\n")) == form


def test_a_list_is_of_parameters_where_its_gradients_are_asked_for(tmp_path: Path) -> None:
    source = "def f(tensors):\n    for t in tensors: t.grad.zero_()\n"
    assert choose_form(written(tmp_path, source)) == "parameters"


def test_hooks_on_a_list_of_parameters_are_registered_once(tmp_path: Path) -> None:
    source = "def f(params):\n    for p in params: p.register_hook(len)\n"
    assert choose_form(written(tmp_path, source)) == "hooks"


def test_every_form_has_what_a_form_needs() -> None:
    forms = {name: load_form(name) for name in form_names()}
    assert len(forms) == 15
    assert len({form.PRECEDENCE for form in forms.values()}) == len(forms)
    assert all(form.EXAMPLE and form.fits.__doc__ for form in forms.values())


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (["a=1", "b=x", "c='1'"], (("a", "1"), ("b", "'x'"), ("c", "'1'"))),
        (["a=@rank", "b=[1, 2]", "c="], (("a", "@rank"), ("b", "[1, 2]"), ("c", "''"))),
        ({"a": 1.5, "b": "1", "c": None}, (("a", "1.5"), ("b", "'1'"), ("c", "None"))),
    ],
)
def test_values_are_literals_or_else_strings(words: list[str], pairs: object) -> None:
    assert adaptation_of(arguments=words).arguments == pairs


@pytest.mark.parametrize("word", ["a", "=1"])
def test_a_value_needs_a_name(word: str) -> None:
    with pytest.raises(UsageError, match="is not of the form NAME=VALUE"):
        adaptation_of(arguments=[word])


def test_a_case_says_again_what_was_said() -> None:
    said = adaptation_of("wrapper", ["a=1"], ["b=x"], "done", "again")
    case = Case(id="c", strategy="s", world=2, adaptation=said, loss="sum/global")
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case) == case
    assert " ".join(case.adapter_words) == (
        "--as wrapper --arg a=1 --set b='x' --finish done --reset again --loss sum/global"
    )


@pytest.mark.parametrize(
    ("adaptation", "message"),
    [
        (Adaptation(form="none"), "unknown form --as none"),
        (Adaptation(arguments=(("a b", "1"),)), "'a b' is no name"),
        (Adaptation(arguments=(("a", "1"), ("a", "2"))), "given more than once"),
        (Adaptation(variables=(("a", "1 +"),)), "is not a Python literal"),
        (Adaptation(finish="a()"), "no name of a method"),
    ],
)
def test_an_edited_case_is_refused(adaptation: Adaptation, message: str) -> None:
    case = Case(id="c", strategy="ddp", world=2, workload="mlp", adaptation=adaptation)
    with pytest.raises(UsageError, match=message):
        plan.check_case(case)


def test_a_lattice_owes_no_bits_of_a_loss_that_is_not_exact() -> None:
    request = plan.Request(
        strategies=("ddp",), worlds=(3,), workloads=("lattice",), loss="mean/world"
    )
    (case,) = plan.plan_cases(request)
    assert "not exact" in plan._lattice_inexact(case, plan.Contract(), [[16, 16, 16]])


def test_defaults_are_left_alone_and_kwargs_take_what_is_left() -> None:
    def f(x, *, scale=2, **rest):  # type: ignore[no-untyped-def]
        return x, scale, rest

    scene = Scene(adaptation_of(arguments={"more": [1]}), lambda spec: spec)
    assert Filling(scene, f, what="f", supplied=["x"]).call(7) == (7, 2, {"more": [1]})


def test_names_of_the_module_are_there_when_it_begins(tmp_path: Path) -> None:
    file = tmp_path / "begins_with_names.py"
    file.write_text("half = SIZE / 2\ndef f(model): return half + LATER\n")
    said = adaptation_of(variables={"SIZE": 4, "LATER": 1})
    load_strategy(f"{file}:f", said)
    assert vars(sys.modules["begins_with_names"])["LATER"] == 1
    assert sys.modules["begins_with_names"].half == 2


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse-gradient"])
def test_who_descends_is_told_from_who_only_moves(sparse: bool) -> None:
    table = nn.Embedding(20, 4, sparse=sparse)
    still = Stillness(table)
    table(torch.tensor([1, 1, 7])).square().sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse is sparse
    still.check("it")
    with torch.no_grad():
        across = torch.ones(20, 4)
        across[[1, 7]] = 0.0  # where nothing descends
        table.weight += across
        still.check("it")
        table.weight -= across + 0.1 * gradient
    with pytest.raises(UsageError, match="it updates the parameters itself"):
        still.check("it")


def test_parameters_without_strides_are_looked_at_as_well() -> None:
    """A sparse one has no torch.equal."""
    rows = nn.ParameterList([nn.Parameter(torch.eye(3).to_sparse())])
    still = Stillness(rows)
    rows[0].grad = torch.eye(3).to_sparse()
    still.check("it")
    with torch.no_grad():
        rows[0] -= 0.1 * rows[0].grad
    with pytest.raises(UsageError, match="it updates the parameters itself"):
        still.check("it")


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
def test_what_the_code_keeps_in_what_was_said_stays(
    tmp_path: Path, takes: str, kept: str, said: dict[str, Any]
) -> None:
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
def test_parameters_are_handed_over_as_callers_do(
    tmp_path: Path, source: str, said: dict[str, Any], left: float
) -> None:
    strategy = loaded(tmp_path, source, **said)
    assert gradients(run(strategy)) == {left}
    assert ("model.parameters(), a generator" in strategy.note) == (left == 4.0)


def test_code_that_a_generator_breaks_is_told_how_to_get_a_list(tmp_path: Path) -> None:
    strategy = loaded(tmp_path, "def g(ps): return len(ps)\ndef f(params): g(params)\n")
    with pytest.raises(UsageError, match=r"has no len.*give --arg params=@param_list"):
        run(strategy)


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
    with pytest.raises(UsageError, match=r"registers hooks, .* give --as hooks"):
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
        loaded(tmp_path, source.replace("TWO", "THREE"))


def test_names_that_a_callable_object_lacks_are_missed(tmp_path: Path) -> None:
    source = "class C:\n  def __call__(self, model): model.weight.grad *= TWO\nf = C()\n"
    with pytest.raises(UsageError, match="uses TWO, which its module does not define"):
        loaded(tmp_path, source)


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


def test_a_namespace_says_what_is_so_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_optimizer_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="seen where it stands around another: a class whose"):
        loaded(tmp_path, "import torch\nclass f(torch.optim.SGD): pass\n")


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
    carrier = Carrier(model, made, made)
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
    with pytest.raises(UsageError, match=r"would be the step, and no world_size.*:f\.sync$"):
        loaded(tmp_path, source)
