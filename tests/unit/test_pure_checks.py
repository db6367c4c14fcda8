"""Checks are functions of a case, a trace and what is expected: nothing that they import trains,
and nothing that they are given can be changed.
"""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest

from distcheck.judge import job
from distcheck.judge.checks import evidence, purpose
from distcheck.judge.oracles import (
    closed_form,
    compression,
    compute_expectation,
    error_feedback,
    forms,
    full_batch,
    full_batch_bound,
    low_rank,
    projections,
    quantum,
    rounding,
    shares,
)
from distcheck.records.expected_events import Happening
from distcheck.records.layers import LAYERS, NO_LAYER, oracle_file

ROOT = Path(__file__).parents[2]
CHECKS = "distcheck.judge.checks"
TRAINING = (  # modules whose purpose is a model, an optimizer or the loop
    "torch.autograd", "torch.optim", "distcheck.training.building", "distcheck.training.optimizers",
    "distcheck.training.loading", "distcheck.training.loop", "distcheck.training.rank",
)  # fmt: skip
CALLS = ("backward", "requires_grad_", "register_hook", "register_forward_hook")
CHANGEABLE = ("list", "dict", "set", "bytearray", "defaultdict")


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_of(path): path.read_text() for path in sorted(ROOT.glob("distcheck/**/*.py"))}


@functools.cache
def imported(source: str) -> tuple[str, ...]:
    """Every name that is imported when a module runs, within functions too."""
    return tuple(_imported(_Running().visit(ast.parse(source))))


class _Running(ast.NodeTransformer):
    """Leaves out what is imported for annotations alone."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def trains(source: str) -> list[str]:
    """What a module does that trains: names of modules it imports, and of methods it calls."""
    tree = ast.parse(source)
    calls = [
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    found = [name for name in imported(source) if name.startswith(TRAINING)]
    return sorted({*found, *(call for call in calls if call in CALLS)})


def reached(sources: Mapping[str, str], start: str) -> set[str]:
    """A module of distcheck, and all that importing it imports."""
    found, left = set[str](), [start]
    while left:
        name = left.pop()
        if name in sources and name not in found:
            found.add(name)
            left += imported(sources[name])
    return found


def that_train(sources: Mapping[str, str], start: str) -> dict[str, list[str]]:
    return {name: why for name in reached(sources, start) if (why := trains(sources[name]))}


@pytest.mark.parametrize("name", [n for n in SOURCES if n == CHECKS or n.startswith(f"{CHECKS}.")])
def test_nothing_that_a_check_imports_trains(name: str) -> None:
    assert not that_train(SOURCES, name)


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("def compare(evidence, tally):\n    evidence.loss.backward()", "backward"),
        ("from torch import autograd", "torch.autograd"),
        ("def compare(e, t):\n    from distcheck.judge.oracles.shards import ShardReference", ""),
        ("from distcheck.judge.oracles.references import References", ""),
        ("from distcheck.judge.oracles.bitwise import parameters", ""),
        ("from distcheck.judge.oracles.full_batch_bound import loss", ""),
    ],
)
def test_a_check_that_trains_would_be_found(planted: str, why: str) -> None:
    name = f"{CHECKS}.loss"
    found = that_train({**SOURCES, name: f"{SOURCES[name]}\n{planted}\n"}, name)
    assert found
    assert not why or why in found[name]


def structs(module: object) -> list[type]:
    """The dataclasses that a module defines."""
    return [
        each
        for each in vars(module).values()
        if dataclasses.is_dataclass(each)
        and isinstance(each, type)
        and each.__module__ == getattr(module, "__name__", "")
    ]


GIVEN = [*structs(forms), *structs(evidence), *structs(job), *structs(shares),
         *structs(projections), *structs(low_rank), *structs(rounding),
         *structs(compression), *structs(quantum), *structs(error_feedback),
         *forms.GradientForms.__subclasses__()]  # fmt: skip


def changeable(struct: type) -> list[str]:
    """The fields of a struct that could be changed in place, by their annotations; and the struct
    itself, where its fields could be assigned.
    """
    params = struct.__dataclass_params__  # type: ignore[attr-defined]
    found = [] if params.frozen else [struct.__name__]
    for field in dataclasses.fields(struct):
        words = {
            node.id
            for node in ast.walk(ast.parse(str(field.type).replace("<class '", "").rstrip(">'")))
            if isinstance(node, ast.Name)
        }
        found += [field.name] if words & set(CHANGEABLE) else []
    return found


@pytest.mark.parametrize("struct", GIVEN, ids=lambda struct: struct.__name__)
def test_what_a_check_is_given_is_frozen(struct: type) -> None:
    assert not changeable(struct)


def test_all_layers_answer_with_such_structs() -> None:
    names = {struct.__name__ for struct in GIVEN if issubclass(struct, forms.GradientForms)}
    assert len(names - {"GradientForms"}) == 6  # X, R, R compressed, R with memory, S, exact
    assert {closed_form.ExactGradients, full_batch_bound.FullBatchBound} <= set(GIVEN)


def test_a_struct_that_can_be_changed_would_be_found() -> None:
    @dataclasses.dataclass
    class Loose:
        number: int

    @dataclasses.dataclass(frozen=True)
    class Shared:
        known: dict[str, int]

    assert changeable(Loose) == ["Loose"]
    assert changeable(Shared) == ["known"]
    assert changeable(full_batch.FullBatch) == ["gradients"]  # which checks are not given


def shared_state(source: str) -> list[str]:
    """Names that a module could keep something in from call to call."""
    tree = ast.parse(source)
    found = [name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names]
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign) and isinstance(
            value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
        ):
            found += [ast.unparse(target) for target in node.targets]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            cached = [ast.unparse(d) for d in node.decorator_list if "cache" in ast.unparse(d)]
            found += [node.name] if cached and node not in _methods(tree) else []
    return [name for name in found if not name.isupper()]  # constants are


def _methods(tree: ast.Module) -> list[ast.stmt]:
    return [part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body]


@pytest.mark.parametrize("name", [n for n in SOURCES if n.startswith(f"{CHECKS}.")])
def test_a_check_keeps_nothing(name: str) -> None:
    assert not shared_state(SOURCES[name])


def test_a_check_that_keeps_something_would_be_found() -> None:
    assert shared_state("told_apart = {}") == ["told_apart"]
    assert shared_state("def f():\n    global seen\n    seen = 1") == ["seen"]
    assert shared_state("@cache\ndef known(n): ...") == ["known"]


@pytest.mark.parametrize("alias", [*LAYERS, NO_LAYER])
def test_a_layer_is_a_file_that_its_line_names(alias: str) -> None:
    name = f"distcheck.judge.oracles.{oracle_file(alias)}"
    assert name in SOURCES
    functions = {n.name for n in ast.parse(SOURCES[name]).body if isinstance(n, ast.FunctionDef)}
    assert functions & {"gradients", "initial_state"}


def test_nothing_is_expected_where_a_check_compares_ranks_alone() -> None:
    assert compute_expectation("rerun", NO_LAYER, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("event", get_args(Happening), ids=lambda event: event.__name__)
def test_every_event_is_looked_for(event: type[Happening]) -> None:
    look = purpose.detector_of_event(event)
    assert inspect.signature(look).parameters["event"].annotation is event
