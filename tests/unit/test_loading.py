"""Names, modules and files become strategies; whatever is wrong gets one clear sentence."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from distcheck.cli.commands.list import catalog, summary_of
from distcheck.contract import BackendAllReduce, Batch, Contract, Step
from distcheck.errors import UsageError
from distcheck.judge.oracles.shards import micro_batch_sizes
from distcheck.plan.cases import check_request
from distcheck.plan.settings import Request
from distcheck.training import loading
from distcheck.training.adapters import names
from distcheck.training.loaded import LoadedStrategy

STEP = Step(index=0, rank=1, world_size=4, samples=64, total_samples=256)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / f"sync_{tmp_path.name}.py"


def load(file: Path, source: str, name: str = "f") -> LoadedStrategy:
    file.write_text(source)
    return loading.load_strategy(f"{file}:{name}")


def test_built_in_strategies_come_in_by_entry_point() -> None:
    assert set(loading.strategy_names()) >= {"allreduce", "ddp", "gather_scatter"}
    loaded = loading.load_strategy("allreduce")
    assert isinstance(loaded.contract.order, BackendAllReduce)
    assert loaded.file.endswith("allreduce.py")


def test_only_a_strange_name_is_asked_of_every_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Somebodys:
        name, module, attr = "theirs", "json", "JSONEncoder.default"
        value = f"{module}:{attr}"

    class Impostor(Somebodys):
        name = "allreduce"

    class Ours(Somebodys):
        name, value = "allreduce", "distcheck_strategies.allreduce:allreduce"

    asked = []

    def points(*, group: str) -> list[type[Somebodys]]:
        asked.append(group)
        return [Somebodys, Impostor, Ours]

    monkeypatch.setattr(loading, "entry_points", points)
    loading.strategy_names.cache_clear()
    loading._registered.cache_clear()
    try:
        for spelling in ("allreduce", "allreduce:"):
            assert loading.load_strategy(spelling).file.endswith("allreduce.py")
        assert not asked
        assert loading.load_strategy("theirs").file.endswith("encoder.py")
        assert asked
        assert loading.strategy_names()["allreduce"].module == "distcheck_strategies.allreduce"
        loading.check_single("theirs")
        with pytest.raises(UsageError, match=r"several .* distcheck_strat.*, json:JSONE"):
            check_request(Request(strategies=("allreduce",)))
    finally:
        monkeypatch.undo()
        loading.strategy_names.cache_clear()
        loading._registered.cache_clear()


@pytest.mark.parametrize(
    ("signature", "takes_step"),
    [
        ("(model)", False),
        ("(model, step)", True),
        ("(model, step=None)", True),
        ("(model, scale=2)", False),
        ("(*args)", True),
    ],
)
def test_functions_get_what_they_take(file: Path, signature: str, takes_step: bool) -> None:
    source = f"seen = []\ndef f{signature}:\n    seen.append([*locals().values()])\n"
    loaded = load(file, source)
    loaded.sync(torch.nn.Linear(1, 1), STEP)
    seen = sys.modules[file.stem].seen[0]
    flat = [x for value in seen for x in (value if isinstance(value, tuple) else [value])]
    assert (STEP in flat) is takes_step
    assert loaded.contract == Contract()


def test_objects_may_leave_methods_out(file: Path) -> None:
    source = (
        "class f:\n"
        "    def wrap(self, model):\n"
        "        self.model = model\n"
        "        return model\n"
        "    def close(self):\n"
        "        self.closed = True\n"
    )
    loaded = load(file, source)
    model, loss = torch.nn.Linear(1, 1), torch.ones(())
    assert loaded.wrap(model) is model
    assert loaded.scale_loss(loss, STEP) is loss
    loaded.sync(model, STEP)
    loaded.close()


def test_an_optimizer_and_a_backward_of_its_own(file: Path) -> None:
    source = (
        "class f:\n"
        "    def backward(self, loss_of, batch, step):\n"
        "        return loss_of(batch)\n"
        "    def optimizer(self, build, parameters):\n"
        "        return build([{'params': list(parameters)}])\n"
    )
    loaded = load(file, source)
    build = partial(torch.optim.SGD, lr=0.5)
    assert loaded.backward is not None
    optimizer = loaded.optimizer(build, torch.nn.Linear(1, 1).parameters())
    assert len(optimizer.param_groups[0]["params"]) == 2
    plain = loading.load_strategy("allreduce")
    assert plain.backward is None
    assert len(plain.optimizer(build, torch.nn.Linear(1, 1).parameters()).param_groups) == 1


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"),
    [(85, 2, [43, 42]), (4, 4, [1] * 4), (1, 2, [1]), (7, 3, [3, 2, 2])],
)
def test_a_shard_in_parts(samples: int, parts: int, sizes: list[int]) -> None:
    ids = torch.arange(samples)
    batch = Batch(inputs=ids.unsqueeze(1).float(), labels=ids % 10, ids=ids, total=100)
    found = batch.split(parts)
    assert [len(part.ids) for part in found] == sizes == micro_batch_sizes(samples, parts)
    assert torch.equal(torch.cat([part.inputs for part in found]), batch.inputs)
    assert torch.equal(torch.cat([part.labels for part in found]), batch.labels)
    assert {part.total for part in found} == {100}


def test_a_file_may_import_its_neighbors(file: Path) -> None:
    (file.parent / f"neighbor_{file.parent.name}.py").write_text("x = 1\n")
    load(file, f"from neighbor_{file.parent.name} import x\ndef f(model): pass\n")


def test_a_file_may_share_a_module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "torch.py"
    loaded = load(file, "def f(model): pass\n")
    assert loaded.file == str(file)
    assert sys.modules["torch"] is torch


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(model:", "f", "syntax error in line 1"),
        ("import nowhere_to_be_found as f", "f", r"ModuleNotFoundError.*line 1"),
        ("\n\nraise ValueError('no')\nf = 1", "f", r"raised ValueError: no .*line 3"),
        ("import sys; sys.exit(3); f = 1", "f", "raised SystemExit"),
        ("\nraise ValueError('trying to initialize the default process group twice!'); f = 1", "f",
         "twice! distcheck has already initialized it; guard the call with dist.is_initialized"),
        ("def g(model): pass", "f", "has no object 'f'; it defines g"),
        ("x = 1", "f", "nothing public"),
        ("f = 3", "f", "is an object of type int; pass a function"),
        ("def f(): pass", "f", r"signature f\(\)"),
        ("class f:\n    pass", "f", r"is the class f\(\); expected .*it has no public method"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(file: Path, source: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(file, source, name)
    sentence, *adapter = str(caught.value).splitlines()
    assert bool(adapter) == sentence.endswith((" FILE.py:sync:", " FILE.py:Adapted:"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("allredcue",
         r"unknown strategy 'allredcue' \(did you mean allreduce\?\); known are allreduce"),
        ("nowhere.py:f", "file nowhere.py does not exist"),
        ("no_such_package.mod:f", "module no_such_package.mod was not found"),
    ],
)  # fmt: skip
def test_names_that_lead_nowhere(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loading.load_strategy(spec)


def test_a_slip_in_the_name_of_an_object_is_answered_before_its_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it_never_runs.py").write_text("raise SystemExit\ndef sync(model): pass\nclass Wire: ...")
    for place in ("it_never_runs.py", "it_never_runs"):
        with pytest.raises(UsageError, match=r"'Wier' \(did you mean Wire\?\); it defines"):
            loading.check_spelling("strategy", f"{place}:Wier", ())
        loading.check_spelling("strategy", f"{place}:Wire.anything", ())


@pytest.mark.parametrize(
    "source",
    [
        "from os import *",
        "def __getattr__(name): return print",
        "globals()['f' + ''] = print",
        "import sys\nsetattr(sys.modules[__name__], 'f', print)",
        "import sys\nsys.modules[__name__].__dict__['f'] = print",
        "exec('f = print')",
        "from os import path as f",
        "import os as f",
        "def g():\n    global f\n    f = print",
        "f, g = print, print",
        "match print:\n    case f: pass",
        "def g(model:",  # what is wrong with that is said where it is loaded
    ],
)
def test_a_name_that_a_file_may_come_to_is_looked_for_in_it(file: Path, source: str) -> None:
    file.write_text(source)
    loading.check_spelling("strategy", f"{file}:f", ())


def test_a_file_without_an_object_gets_an_example(file: Path) -> None:
    file.write_text("def _private(): pass\ndef mine(model): pass\n")
    with pytest.raises(UsageError, match=f"for example {file}:mine"):
        loading.check_spelling("strategy", str(file), [])


def test_workloads() -> None:
    assert set(loading.workload_names()) == {
        "exact", "mlp", "cnn", "composite", "vgg11", "transformer", "experts", "tokens",
        "features", "generated", "twelve_steps",
    }  # fmt: skip
    assert loading.load_workload("exact").own_samples is not None
    assert loading.load_workload("mlp").own_samples is None
    with pytest.raises(UsageError, match="unknown workload 'resnet'; known are cnn"):
        loading.load_workload("resnet")
    with pytest.raises(UsageError, match="has no model, loss, optimizer"):
        loading.load_workload("json:JSONDecoder")


def test_summaries_import_nothing() -> None:
    assert summary_of("distcheck.workloads.mlp").startswith("A three-layer perceptron")
    assert summary_of("no.such.module") == "(not found)"


def test_every_strategy_has_a_line_of_its_own() -> None:
    """Also those that share a file."""
    (strategies,) = [rows for heading, rows in catalog() if heading == "strategies"]
    lines = [line for _, line in strategies]
    assert all(line.endswith(".") for line in lines)
    assert len(set(lines)) == len(lines) > 12


def test_an_unused_broken_module_is_ignored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As mpi4py without an MPI: importing it is a RuntimeError."""
    broken = file.with_name("broken_mpi.py")
    broken.write_text('raise RuntimeError("cannot load MPI library")\n')
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setitem(names.IMPORTED, "MPI", "broken_mpi")
    source = "def f(model):\n    if model is None:\n        MPI.Finalize()\n"
    loaded = load(file, source)
    loaded.sync(torch.nn.Linear(1, 1), STEP)
    with pytest.raises(UsageError, match="uses MPI, which its module does not define"):
        load(file.with_name("other.py"), source.replace("is None", "is not None")).sync(
            torch.nn.Linear(1, 1), STEP
        )
