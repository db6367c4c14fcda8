"""Names that code reads from its module, but that its module does not define.

A training script assigns them under `if __name__ == "__main__"`, or in a function that is not
called here. Names with a known meaning are filled in, and modules are imported. All others get a
stand-in that raises when used, with the `--set` option that defines it.
"""

import builtins
import contextlib
import importlib
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from distcheck.errors import UsageError, did_you_mean
from distcheck.training.adapters import names
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import (
    ReachedCode,
    Source,
    assigned_globals,
    called_function,
)
from distcheck.training.adapters.target import Target, named_parameters, required_parameters
from distcheck.training.adapters.unknown import MissingValue, stand_in, suggested_options

_FILLED = "__distcheck_filled__"  # in a module: the values put there, by name
# Meanings that change during training, and the attribute of the scene that they need.
_LATER = {
    "model": "model", "optimizer": "optimizer", "step": "step", "index": "step",
    "rate": "optimizer", "device": "model",
}  # fmt: skip


class FreeNames:
    """The module-level names of one piece of code that must be filled in."""

    def __init__(self, target: Target, scene: Scene) -> None:
        self._scene = scene
        self._module = target.module
        self._variables = dict(target.adaptation.variables)
        for name, text in self._variables.items():
            _check_used(name, target)
            scene.check(text)
        names_missing, sources = _missing(called_function(target.value), target.module)
        missing = sorted(names_missing - self._variables.keys())
        self.filled = {
            name: meaning
            for name in missing
            if name not in names.IMPORTED and (meaning := _meaning(name, sources))
        }
        self._stand_in([name for name in missing if name not in self.filled], target)
        self._written: set[str] = set()

    def _stand_in(self, unknown: list[str], target: Target) -> None:
        """Import modules under their common names; other names get values that raise when used."""
        for name in unknown:
            value: Any = None
            if name in names.IMPORTED:
                # mpi4py raises RuntimeError if it finds no MPI library.
                with contextlib.suppress(ImportError, RuntimeError, OSError):
                    value = importlib.import_module(names.IMPORTED[name])
            sentence = (
                f"strategy {target.spec!r} uses {name}, which its module does not define; pass "
                f"{suggested_options('--set', [name], None)}"
            )
            self._set_name(name, stand_in(name, sentence) if value is None else value)

    def _set_name(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)
        vars(self._module).setdefault(_FILLED, {})[name] = value

    def publish(self) -> None:
        """Set the names known so far in the module. Constants are set only once, because the code
        may keep state in them between steps.
        """
        if self._module is None:
            return
        for name, meaning in self.filled.items():
            if self._is_due(name, meaning):
                self._set_name(name, self._scene.value(meaning))
        for name, text in self._variables.items():
            meaning = names.meaning_of(text[1:]) if text.startswith("@") else ""
            if self._is_due(name, meaning):
                self._write(name, self._scene.read(text))

    def _is_due(self, name: str, meaning: str) -> bool:
        if meaning in _LATER:
            return getattr(self._scene, _LATER[meaning]) is not None
        new = name not in self._written
        self._written.add(name)
        return new

    def _write(self, name: str, value: Any) -> None:
        """Set a name, or an attribute such as `args.lr`. Raises UsageError."""
        place: Any = self._module
        *path, last = name.split(".")
        for part in path:
            if not hasattr(place, part):
                raise UsageError(
                    f"--set {name}: {part!r} does not exist, so {last!r} cannot be set"
                )
            place = getattr(place, part)
        setattr(place, last, value)


def _check_used(name: str, target: Target) -> None:
    """Raise UsageError for a name that does not occur in the module's source, such as a misspelled
    one, which nothing would read. The module's namespace cannot be checked, because the name was
    set there before it ran.
    """
    first = name.partition(".")[0]
    if target.module is None:
        return
    try:
        source = inspect.getsource(target.module)
    except (OSError, TypeError):
        return
    if not re.search(rf"\b{re.escape(first)}\b|import \*", source):
        known = [one for one in vars(target.module) if not one.startswith("_") and one != first]
        raise UsageError(
            f"--set {name}: {target.module.__name__} neither defines nor uses "
            f"{first!r}{did_you_mean(first, known)}; pass a name that occurs in its file"
        )


def _meaning(name: str, sources: list[Source]) -> str:
    """Return the meaning of a name; empty if it is unknown, or if it is named like a group and used
    as a communicator: the code that reads it may never run.
    """
    meaning = names.FREE.get(name, "")
    uses = {source.kind_by_use(name) for source in sources}
    if meaning == "group" and "communicator" in uses:
        return ""
    return "group" if meaning == "communicator" and "group" in uses else meaning


def _missing(value: Any, module: ModuleType | None) -> tuple[set[str], list[Source]]:
    """Return the names that are read and not defined, and the sources of all reached code."""
    if module is None:
        return set(), []
    known = vars(module)
    reached = ReachedCode(value, module)
    # Names filled in for another strategy of the same module are not the module's own.
    filled = known.get(_FILLED, {})
    defined = {n for n, v in known.items() if n not in filled or v is not filled[n]}
    unbound = reached.read - reached.written - defined
    missing = {name for name in unbound if not hasattr(builtins, name)}
    return missing - {"__class__"}, reached.sources


class StartUp:
    """Functions of a module that set a global variable which the code reads, never sets, and finds
    empty, such as `def init(model): global _buffers; ...`. A training script calls them before its
    first step. The rank does the same, with the arguments that they request.
    """

    def __init__(self, target: Target, scene: Scene) -> None:
        self._scene, self._calls = scene, list[Filling]()
        called = []
        for function in _set_up(target):
            try:
                self._calls.append(Filling(scene, function, what=f"{function.__name__}()"))
            except UsageError:
                continue
            called.append(f"{function.__name__}()")
        self.note = f"called once before training: {', '.join(called)}" if called else ""
        self.made: list[Any] = []  # the object under test, if a method sets it up
        self.making: tuple[Filling, str, bool] | None = None

    def make(self, making: Filling, first: str, *, lends: bool) -> None:
        """Construct an object before training and call its method `first`. With `lends`, the
        workload's optimizer replaces the object's.
        """
        self.making = making, first, lends
        how = f"{first}() is called before training"
        how += ", and its optimizer is the workload's" * lends
        self.note = "; ".join(filter(None, [self.note, how]))

    def ready(self) -> Any:
        (made,) = self.made
        for name, value in list(vars(made).items()):
            if self.making and self.making[2] and isinstance(value, torch.optim.Optimizer):
                setattr(made, name, self._scene.value("optimizer"))
        return made

    def run(self, model: nn.Module) -> nn.Module:
        """Call the functions and return the module to train; this does not count as use."""
        before, answer = self._scene.calls, None
        for filling in self._calls:
            filling.call()
        if self.making is not None:
            making, first, _ = self.making
            self.made[:] = [making.call()]
            answer = Filling(self._scene, getattr(self.made[0], first), what=f"{first}()").call()
        self._scene.calls = before
        return answer if isinstance(answer, nn.Module) else model


def _set_up(target: Target) -> list[Callable[..., Any]]:
    module = target.module
    if module is None:
        return []
    reached = ReachedCode(called_function(target.value), module)
    empty = {n for n in reached.read - reached.written if _is_empty(module, n)}
    by_name: dict[str, list[Callable[..., Any]]] = {}
    for value in list(vars(module).values()):
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            for name in assigned_globals(value) & empty:
                by_name.setdefault(name, []).append(value)
    # If several functions set a name, it is unknown which one the script calls.
    only = dict.fromkeys(setters[0] for setters in by_name.values() if len(setters) == 1)
    return [function for function in only if _may_be_called(function)]


def _is_empty(module: ModuleType, name: str) -> bool:
    """Return True if a global name is None or an empty container."""
    value = getattr(module, name, None)
    if value is None or type(value).__name__.startswith(MissingValue.__name__):
        return True
    return isinstance(value, list | dict | set | tuple) and not value


def _may_be_called(function: Callable[..., Any]) -> bool:
    """Return True if a function sets up and does not train, judged by its parameters and calls."""
    source = Source(function)
    parameters = required_parameters(named_parameters(function))
    known = all(source.meaning_of(p.name) in names.BEFORE_TRAINING for p in parameters)
    return known and not source.words & {"backward", "init_process_group", "spawn", "parse_args"}
