"""The functions of a module that set up what a synchronisation finds in global names.

`def init(model): global _buffers; ...`: a training calls it before its first step, and so does the
world, with what its parameters ask for.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from distcheck.errors import UsageError
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Reached, Source, function_of, own_globals
from distcheck.training.adapters.target import Target, named_parameters, required
from distcheck.training.adapters.unknown import NotGiven

_BEFORE_TRAINING = {
    "model", "rank", "local_rank", "world_size", "group", "communicator", "device", "backend",
    "arguments", "parameters", "named_parameters", "listed_parameters", "distributed", "root",
}  # fmt: skip


class StartUp:
    """Those that set a global name that the code reads, never sets itself, and finds empty."""

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

    def run(self) -> None:
        """Calls them; whether the code under test was called is counted without that."""
        before = self._scene.calls
        for filling in self._calls:
            filling.call()
        self._scene.calls = before


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
