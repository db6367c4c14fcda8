"""Names that code takes from its module and that its module does not define.

In a training script they are assigned under `if __name__ == "__main__"`, or by a function that
is not called here. Those with a usual name are filled in, modules are imported. The others get a
stand-in that ends the run where it is used, with the `--set` that gives it a value.
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

from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean
from distcheck.training.adapters import names
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import (
    COLLECTIVES,
    Reached,
    Source,
    function_of,
    own_globals,
)
from distcheck.training.adapters.target import (
    Target,
    named_parameters,
    own_classes,
    required,
    sources_of,
)
from distcheck.training.adapters.unknown import NotGiven, options, stand_in

_BEFORE_TRAINING = {
    "model", "rank", "local_rank", "world_size", "group", "communicator", "device", "backend",
    "arguments", "parameters", "named_parameters", "listed_parameters", "distributed", "root",
}  # fmt: skip


_WORKS = {"grad", *COLLECTIVES} - {"broadcast", "send", "recv"}
_FILLED = "__distcheck_filled__"  # in a module: what was put there, by name
# What changes as training goes on, and what of the scene has to be there for it.
_LATER = {
    "model": "model", "optimizer": "optimizer", "step": "step", "index": "step",
    "rate": "optimizer", "device": "model",
}  # fmt: skip


class FreeNames:
    """The module-level names of one piece of code that have to be filled in."""

    def __init__(self, target: Target, scene: Scene) -> None:
        self._scene = scene
        self._module = target.module
        self._variables = dict(target.adaptation.variables)
        for name, text in self._variables.items():
            _check_used(name, target)
            scene.check(text)
        names_missing, sources = _missing(function_of(target.value), target.module)
        missing = sorted(names_missing - self._variables.keys())
        self.filled = {
            name: meaning
            for name in missing
            if name not in names.IMPORTED and (meaning := _meaning(name, sources))
        }
        self._stand_in([name for name in missing if name not in self.filled], target)
        self._written: set[str] = set()

    def _stand_in(self, unknown: list[str], target: Target) -> None:
        """Gives modules under their usual names, and to the rest what fails when it is used."""
        for name in unknown:
            value: Any = None
            if name in names.IMPORTED:
                # mpi4py raises RuntimeError where it finds no MPI.
                with contextlib.suppress(ImportError, RuntimeError, OSError):
                    value = importlib.import_module(names.IMPORTED[name])
            sentence = (
                f"strategy {target.spec!r} uses {name}, which its module does not define; "
                f"give {options('--set', [name], None)}"
            )
            self._put(name, stand_in(name, sentence) if value is None else value)

    def _put(self, name: str, value: Any) -> None:
        """Writes a name into the module that the module does not define."""
        setattr(self._module, name, value)
        vars(self._module).setdefault(_FILLED, {})[name] = value

    def publish(self) -> None:
        """Writes into the module what is known by now. What does not change as training goes on is
        written once: the code may keep something under the name from step to step.
        """
        if self._module is None:
            return
        for name, meaning in self.filled.items():
            if self._is_due(name, meaning):
                self._put(name, self._scene.value(meaning))
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
        """Also `args.lr`, an attribute of something that the module has."""
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
    """Raises UsageError for a name that is nowhere in the module's source: a slip of the pen, whose
    value nothing would read. The module itself has the name: it was put there before it began.
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
            f"{first!r}{did_you_mean(first, known)}; give a name that is in its file"
        )


def _meaning(name: str, sources: list[Source]) -> str:
    """What a name stands for; empty if nothing is known, or if it is a group by its name and used
    as a communicator: what reads it may never be reached.
    """
    meaning = names.FREE.get(name, "")
    uses = {source.use_of(name) for source in sources}
    if meaning == "group" and "communicator" in uses:
        return ""
    return "group" if meaning == "communicator" and "group" in uses else meaning


def _missing(value: Any, module: ModuleType | None) -> tuple[set[str], list[Source]]:
    """The names that are read and not defined, and the sources of all that is reached."""
    if module is None:
        return set(), []
    known = vars(module)
    reached = Reached(value, module)
    # What was filled in for another strategy of the same module is not the module's own.
    filled = known.get(_FILLED, {})
    defined = {n for n, v in known.items() if n not in filled or v is not filled[n]}
    unbound = reached.read - reached.written - defined
    missing = {name for name in unbound if not hasattr(builtins, name)}
    return missing - {"__class__"}, reached.sources


class StartUp:
    """The functions of a module that set a global name that the code reads, never sets itself, and
    finds empty. `def init(model): global _buffers; ...`: a training calls it before its first step,
    and so does the world, with what its parameters ask for.
    """

    def __init__(self, target: Target, scene: Scene) -> None:
        self._scene, self._calls = scene, list[Filling]()
        names = []
        for function in _set_up(target):
            try:
                self._calls.append(Filling(scene, function, what=f"{function.__name__}()"))
            except UsageError:
                continue
            names.append(f"{function.__name__}()")
        self.note = f"called once before training: {', '.join(names)}" if names else ""
        self.made: list[Any] = []  # the object under test, where a method sets it up
        self._make: Callable[[], Any] | None = None

    def make(self, making: Filling, first: str, *, lends: bool) -> None:
        """Has an object made before training, and its method `first` called. If it `lends`, the
        object steps the workload's optimizer in place of its own.
        """

        def make() -> Any:
            self.made[:] = [making.call()]
            method = getattr(self.made[0], first)
            return Filling(self._scene, method, what=f"{first}()").call()

        self._make, self._lends = make, lends
        how = f"{first}() is called before training"
        how += ", and its optimizer is the workload's" * lends
        self.note = "; ".join(filter(None, [self.note, how]))

    def ready(self) -> Any:
        """Return that object."""
        (made,) = self.made
        held = {n for n, v in vars(made).items() if isinstance(v, torch.optim.Optimizer)}
        for name in held if self._lends else ():
            setattr(made, name, self._scene.value("optimizer"))
        return made

    def run(self, model: nn.Module) -> nn.Module:
        """Calls them, and returns the module that is trained; whether the code under test was
        called is counted without that.
        """
        before = self._scene.calls
        for filling in self._calls:
            filling.call()
        answer = self._make() if self._make is not None else None
        self._scene.calls = before
        return answer if isinstance(answer, nn.Module) else model


def sets_up(kind: Any) -> str:
    """The method that gives an object its model before training, by the attributes that it sets for
    the others or by the hooks that it registers; empty if none or several do. It takes a model,
    which the constructor does not, and neither reads gradients nor reduces by itself.
    """
    if not inspect.isclass(kind) or issubclass(kind, nn.Module | torch.optim.Optimizer):
        return ""
    names = {
        n for base in own_classes(kind) for n, v in vars(base).items() if inspect.isfunction(v)
    }
    own = {name: sources_of(kind, name) for name in names}
    uses = {n: set[str]().union(*(s.attributes_of("self") for s in own[n])) for n in names}
    found = []
    for name in sorted(names - {"__init__"}):
        asked = [Source(kind).meaning_of(p.name) for p in _asked(getattr(kind, name), skip=1)]
        given = {n for s in own[name] for n in s.attributes_of("self", assigned=True)}
        read = set[str]().union(*(uses[other] for other in names - {"__init__", name}))
        works = set[str]().union(*(s.words for s in own[name])) & _WORKS
        hooked = any(source.registers_hooks for source in own[name])
        if "model" not in asked or not _BEFORE_TRAINING.issuperset(asked) or name in read:
            continue
        if hooked or (given & read and not works):
            found.append(name)
    takes_one = "model" in {meaning_of(p.name) for p in _asked(kind)}
    return found[0] if len(found) == 1 and len(names) > 1 and not takes_one else ""


def _asked(value: Any, *, skip: int = 0) -> list[inspect.Parameter]:
    return required(named_parameters(value, skip=skip))


def _set_up(target: Target) -> list[Callable[..., Any]]:
    module = target.module
    if module is None:
        return []
    reached = Reached(function_of(target.value), module)
    empty = {n for n in reached.read - reached.written if _is_empty(module, n)}
    by_name: dict[str, list[Callable[..., Any]]] = {}
    for value in list(vars(module).values()):
        if inspect.isfunction(value) and value.__module__ == module.__name__:
            for name in own_globals(value) & empty:
                by_name.setdefault(name, []).append(value)
    # Of several that set a name nothing tells which one the training calls.
    only = dict.fromkeys(setters[0] for setters in by_name.values() if len(setters) == 1)
    return [function for function in only if _may_be_called(function)]


def _is_empty(module: ModuleType, name: str) -> bool:
    """Whether a global name holds nothing yet: None, or something empty that can be filled."""
    value = getattr(module, name, None)
    if value is None or type(value).__name__.startswith(NotGiven.__name__):
        return True
    return isinstance(value, list | dict | set | tuple) and not value


def _may_be_called(function: Callable[..., Any]) -> bool:
    """Whether it sets up and does not train: by what it asks for, and by what it calls."""
    source = Source(function)
    parameters = required(named_parameters(function))
    known = all(source.meaning_of(p.name) in _BEFORE_TRAINING for p in parameters)
    return known and not source.words & {"backward", "init_process_group", "spawn", "parse_args"}
