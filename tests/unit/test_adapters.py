"""Which form code is taken for, what is filled in, and what is said of options."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Contract, Step
from distcheck.errors import UsageError
from distcheck.plan import cases as plan
from distcheck.plan.settings import Request
from distcheck.records import Adaptation, Case
from distcheck.training.adapters import forms
from distcheck.training.adapters.answers import NoStepCheck
from distcheck.training.adapters.forms import comm_hook
from distcheck.training.adapters.options import adaptation_of
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loading import check_spelling, inspect_strategy, load_strategy, load_trained
from distcheck.training.scripts import line_of_training

STEP = Step(index=0, rank=0, world_size=1, samples=1, total_samples=1)


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def target_of(folder: Path, source: str, name: str = "f") -> Target:
    namespace: dict[str, object] = {}
    file = folder / "code.py"
    file.write_text(source)
    exec(compile(source, str(file), "exec"), namespace)
    head, _, tail = name.partition(".")
    found = namespace[head]
    owner = found if tail and isinstance(found, type) else None
    return Target(f"code.py:{name}", getattr(found, tail) if tail else found, owner, None)


def choose_form(target: Target) -> str:
    form = forms.choose_form(target)
    return form.name if form else ""


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
        ("def f(dist, net):\n  dist.all_reduce(net.weight)", "f", "model"),
        ("def f(args, tensor): pass", "f", "tensor-mean"),
        ("def f(c, thing):\n  c.Allreduce(1)\n  thing.named_parameters()", "f", "model"),
        ("def f(step, optim): pass", "f", "model"),
        ("def f(comm, grads): pass", "f", "gradients"),
        ("def f(grads, size): pass", "f", "gradients"),
        ("def f(tensors): pass", "f", "gradients"),
        ("class f:\n  def __init__(self, x: 'list[nn.Parameter]'): pass", "f", ""),
        ("class f:\n  def __init__(self, x: 'list[torch.Tensor]'): pass", "f", ""),
        ("import torch\nclass f(torch.optim.SGD): pass", "f", "own-optimizer"),
        ("import torch\nclass f(torch.optim.Optimizer): pass", "f", "own-optimizer"),
        ("from contextlib import *\n@contextmanager\ndef f(model): yield", "f", "context"),
        ("class f:\n  def __enter__(self): pass\n  def __exit__(self, *e): pass", "f", "context"),
        ("def f(group, tensor): pass", "f", "tensor-mean"),
        ("def f(rank, params, size): pass", "f", "parameters"),
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
        ("def f(model, lr):\n  for p in model: p.grad.data -= 1", "f", "parameters"),
        ("def f(model, lr):\n  for p in model: p.data += lr", "f", "model"),
        ("class f:\n  def __init__(self, module): pass", "f", "wrapper"),
        ("class f:\n  def __init__(self, optimizer): pass", "f", "optimizer"),
        ("class f:\n  def __init__(self, params, optimizer_cls): pass", "f", "sharded-optimizer"),
        ("import torch\nclass f(torch.optim.SGD):\n  def __init__(self, *a, **k): pass", "f",
         "own-optimizer"),
        ("import torch\nclass f(torch.optim.Optimizer):\n  def __init__(self, params, local_opt): "
         "pass", "f", "optimizer"),
        ("class f:\n  def __init__(self, x): x.register_comm_hook(0, 0)", "f", "wrapper"),
        ("class f:\n  def __init__(self, x): pass\n  def g(self): pass", "f.g", "method"),
        ("class f:\n  def __init__(self, model): pass\n  def g(self): pass", "f.g", "wrapper"),
        ("class f:\n  def __init__(self, model, optimizer): pass\n  def g(self): pass", "f.g",
         "method"),
        ("class f:\n  def wrap(self, model): pass", "f", "strategy"),
        ("class f:\n  pass", "f", ""),
        ("f = 3", "f", ""),
    ],
)  # fmt: skip
def test_the_signature_selects_the_form(tmp_path: Path, source: str, name: str, form: str) -> None:
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
    with pytest.raises(UsageError, match=f" is {kind}, and calling it runs nothing"):
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


@pytest.mark.parametrize(
    ("body", "role"),
    [("x @ y.transpose(0, 1)", "features"), ("cross_entropy(x, y)", "labels")],
)
def test_a_view_may_be_named_like_labels(tmp_path: Path, body: str, role: str) -> None:
    (tmp_path / "code.py").write_text(f"def f(x, y): return {body}")
    workload: Any = load_trained(f"{tmp_path / 'code.py'}:f", Adaptation(form="loss")).workload
    assert workload._given == {"x": "features", "y": role}


@pytest.mark.parametrize(("default", "known"), [("", False), ("=None", True)])
def test_a_closure_that_is_required_is_exercised(tmp_path: Path, default: str, known: bool) -> None:
    source = (
        f"class f:\n  def __init__(self, opt): pass\n  def step(self, closure{default}): closure()"
    )
    (tmp_path / "code.py").write_text(source)
    uses = inspect_strategy(f"{tmp_path / 'code.py'}:f", Adaptation()).uses
    assert ("closure" in [use.feature for use in uses]) is known


def test_every_form_has_what_a_form_needs() -> None:
    """A row says when the code is called, or has a file of its own."""
    assert len({form.name for form in forms.FORMS}) == len(forms.FORMS) == 23
    files = {path.stem for path in Path(forms.__file__).parent.glob("*.py")} - {"__init__"}
    own = [form for form in forms.FORMS if form.called is None]
    of_rows = {form.file or form.name.replace("-", "_") for form in own}
    assert files == of_rows
    for form in forms.FORMS:
        assert form.example
        assert callable(form.own.adapt if form.called is None else form.fits)
        assert form.called is None or (form.lacks and form.note)


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
    assert " ".join(case.adapter_options) == (
        "--as wrapper --arg a=1 --set b='x' --finish done --reset again --loss sum/global"
    )


@pytest.mark.parametrize(
    ("adaptation", "message"),
    [
        (Adaptation(form="none"), "unknown form --as none"),
        (Adaptation(arguments=(("a b", "1"),)), "'a b' is not a Python name"),
        (Adaptation(arguments=(("a", "1"), ("a", "2"))), "given more than once"),
        (Adaptation(variables=(("a", "1 +"),)), "is not a Python literal"),
        (Adaptation(finish="a()"), "not the name of a method"),
    ],
)
def test_an_edited_case_is_refused(adaptation: Adaptation, message: str) -> None:
    case = Case(id="c", strategy="ddp", world=2, workload="mlp", adaptation=adaptation)
    with pytest.raises(UsageError, match=message):
        plan.check_case(case)


def test_exact_requires_no_bits_of_a_loss_that_is_not_exact() -> None:
    request = Request(strategies=("ddp",), worlds=(3,), workloads=("exact",), loss="mean/world")
    (case,) = plan.plan_cases(request)
    assert "not exact" in plan._why_not_exact(case, Contract(), [[16, 16, 16]])


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


def test_a_name_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "reads_names.py"
    file.write_text("RATE = 1\ndef f(model): return RATE + GIVEN\n")
    load_strategy(f"{file}:f", adaptation_of(variables={"RATE": 2, "GIVEN": 1}))
    with pytest.raises(UsageError, match=r"--set RTE: .* uses 'RTE' \(did you mean RATE\?\)"):
        load_strategy(f"{file}:f", adaptation_of(variables={"RTE": 2, "GIVEN": 1}))
    file = tmp_path / "imports_names.py"
    file.write_text("from reads_names import *\ndef f(model): return RATE\n")
    load_strategy(f"{file}:f", adaptation_of(variables={"OTHER": 2}))


def test_a_hook_without_a_future_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would end the process by a signal."""
    hooks = []

    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()

        def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
            hooks.append(hook)

    monkeypatch.setattr(comm_hook, "DistributedDataParallel", Wrapped)
    (tmp_path / "returns.py").write_text("def f(state, bucket): return bucket\n")
    strategy = load_strategy(f"{tmp_path}/returns.py:f")
    assert strategy.wrap is not None
    strategy.wrap(nn.Linear(1, 1))
    future = torch.futures.Future[torch.Tensor]()
    assert hooks[0](None, future) is future
    with pytest.raises(TypeError, match=r"the hook returned NoneType; DDP expects a torch.futures"):
        hooks[0](None, None)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse-gradient"])
def test_who_descends_is_told_from_who_only_moves(sparse: bool) -> None:
    table = nn.Embedding(20, 4, sparse=sparse)
    still = NoStepCheck(table)
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
    still = NoStepCheck(rows)
    rows[0].grad = torch.eye(3).to_sparse()
    still.check("it")
    with torch.no_grad():
        rows[0] -= 0.1 * rows[0].grad
    with pytest.raises(UsageError, match="it updates the parameters itself"):
        still.check("it")


def test_what_is_asked_for_comes_with_values_to_try(tmp_path: Path) -> None:
    """All at once: by a word in the name, by the parser's default, by an assignment."""
    (tmp_path / "asks.py").write_text(
        "import argparse\n"
        "chunk = 4\n"
        "def sync(model, coef_mb, dp_ranks, chunk, wire, odd, size_mib, cap_bytes): pass\n"
        "def reads(model, args): model.x = args.coef, args.num_learners, args.odd\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--coef-mb', type=int, default=50)\n"
        "parser.add_argument('--coef', default=0.5)\n"
        "parser.add_argument('--wire', default='$(reboot)')\n"
    )
    with pytest.raises(UsageError) as caught:
        load_strategy(f"{tmp_path / 'asks.py'}:sync")
    assert str(caught.value).endswith(
        "unknown parameters coef_mb, dp_ranks, chunk, wire, odd, size_mib, cap_bytes; pass "
        "--arg coef_mb=50 --arg dp_ranks=@world_size --arg chunk=4 --arg wire=VALUE "
        "--arg odd=VALUE --arg size_mib=25 --arg cap_bytes=26214400"
    )
    loaded = load_strategy(f"{tmp_path / 'asks.py'}:reads")
    with world_of_one(), pytest.raises(UsageError) as caught:
        loaded.sync(nn.Linear(1, 1), STEP)
    assert str(caught.value) == (
        "the code reads args.coef, args.num_learners, args.odd, which distcheck does not know; "
        "pass --arg args.coef=0.5 --arg args.num_learners=@world_size --arg args.odd=VALUE"
    )


@pytest.mark.parametrize(
    ("body", "note"),
    [
        (
            "def attach(self, model): self.m = model\n def reduce_grads(self): self.m",
            "attach() is called",
        ),
        # Another method calls it, or it works on gradients itself.
        (
            "def attach(self, model): self.m = model\n def sync_grads(self, net): self.attach(net)",
            "",
        ),
        ("def attach(self, model): self.m = model.w.grad\n def reduce_grads(self): self.m", ""),
        ("def set_model(self, model): self.m = model\n def step(self): self.m", "set_model() is"),
        (
            "def __init__(self, module): self.m = module\n def wrap_it(self): self.hook()\n"
            " def hook(self): self.m.register_forward_hook(1)",
            "wrap_it() called once before training",
        ),
        (
            "def __init__(self, module): self.m = module\n def go(self): pass\n"
            " def prepare(self): return self.m",
            "finish go(), prepare() called once before training",
        ),
        (
            "def reduce_grads(self, pairs):\n  for name, p in pairs: p.grad",
            "model.named_parameters()",
        ),
        (
            "def __init__(self, n_nodes=1, rank=0, size=1): pass\n def sync_grads(self, net): pass",
            "n_nodes=@n_nodes, rank=@rank (override with --arg)",
        ),
    ],
)
def test_objects_are_set_up_as_training_loops_do(tmp_path: Path, body: str, note: str) -> None:
    (tmp_path / "set_up.py").write_text(f"class f:\n {body}\n")
    found = load_strategy(f"{tmp_path / 'set_up.py'}:f").note
    assert note in found if note else "before training" not in found


def test_a_script_without_a_function_is_a_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nfor _ in range(3):\n    pass\n")
    with pytest.raises(UsageError, match=r"job -- torchrun --nproc-per-node 2 .*train\.py"):
        check_spelling("strategy", str(tmp_path / "train.py"), ["ddp"])


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import torch\nloss.backward()", 2),
        ("if True:\n    for _ in []:\n        loss.backward()", 3),
        ("if __name__ == '__main__':\n    loss.backward()", 0),
        ("def train(): loss.backward()\nclass A:\n    loss.backward()", 0),
        ("dist.init_process_group()", 0),
        ("def (", 0),
    ],
)
def test_where_a_file_trains_when_it_is_imported(source: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(source)
    assert line_of_training(tmp_path / "train.py") == line


def test_a_guarded_process_group_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    """Only where the file cannot be imported are its definitions run alone."""
    (tmp_path / "guarded.py").write_text(
        "import torch.distributed as dist\n"
        "if not dist.is_initialized():\n    dist.init_process_group('gloo')\n"
        "made = sum([1, 2])\n"
        "def sync(model): assert made == 3\n"
    )
    with world_of_one():
        load_strategy(f"{tmp_path / 'guarded.py'}:sync").sync(nn.Linear(1, 1), STEP)


MPI_HELPER = """
import mpi4py_of_test as MPI
def mean(x):
    MPI.COMM_WORLD.Allreduce(x)
def rank():
    return MPI.COMM_WORLD.Get_rank()
"""


@pytest.mark.parametrize(
    ("text", "by_mpi"),
    [
        ("from helper_of_mpi import mean\ndef sync(model):\n    mean(model)\n", True),
        ("from helper_of_mpi import rank\nimport torch.distributed as dist\n"
         "def sync(model):\n    for p in model.parameters():\n        dist.all_reduce(p.grad)\n"
         "    rank()\n", False),
    ],
)  # fmt: skip
def test_mpi_is_seen_through_a_helper(
    text: str, by_mpi: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that go through it are none of gloo's; one that asks it for a rank may be."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mpi4py_of_test.py").write_text("class COMM_WORLD: ...\n__name__ = 'mpi4py.MPI'\n")
    (tmp_path / "helper_of_mpi.py").write_text(MPI_HELPER)
    (tmp_path / f"sync_{by_mpi}.py").write_text(text)
    try:
        loaded = load_strategy(f"{tmp_path / f'sync_{by_mpi}.py'}:sync")
        assert loaded.contract.backend == ("mpi" if by_mpi else None)
    finally:
        for name in ("mpi4py_of_test", "helper_of_mpi", f"sync_{by_mpi}"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("line", "gets_one"),
    [
        ("model.register_comm_hook(None, f)", True),
        ("self.model = model; self.model.register_comm_hook(None, f)", True),
        ("self.model = DDP(model); self.model.register_comm_hook(None, f)", False),
        ("self.other = model; self.other.register_comm_hook(None, f)", False),
    ],
)
def test_code_that_registers_a_communication_hook_gets_a_module_of_ddp(
    tmp_path: Path, line: str, gets_one: bool
) -> None:
    source = f"class f:\n    def __init__(self, model):\n        {line}\n"
    assert target_of(tmp_path, source).hooks_ddp is gets_one


def test_a_closure_that_step_accepts_can_be_passed(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text(
        "class f:\n    def __init__(self, optimizer, dist): self.inner = optimizer\n"
        "    def step(self, closure=None): self.inner.step(closure)\n"
    )
    place, closure = f"{tmp_path / 'closed.py'}:f", (("closure", "@closure"),)
    assert load_strategy(place).backward is None
    assert load_strategy(place, Adaptation(arguments=closure)).backward is not None
