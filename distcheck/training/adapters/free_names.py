"""Names that code takes from its module and that its module does not define.

In a training script they are assigned under `if __name__ == "__main__"`, or by a function that
is not called here. Those with a usual name are filled in, modules are imported. The others get a
stand-in that ends the run where it is used, with the `--set` that gives it a value.
"""

import builtins
import contextlib
import dis
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any

from distcheck.errors import UsageError
from distcheck.training.adapters import names, proposals
from distcheck.training.adapters.not_given import stand_in
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.source import Source, function_of
from distcheck.training.adapters.target import Target

_FILLED = "__distcheck_filled__"  # in a module: what was put there, by name
_LATER = ("model", "optimizer", "step", "index", "rate", "device")  # as training goes on


class FreeNames:
    """The module-level names of one piece of code that have to be filled in."""

    def __init__(self, target: Target, scene: Scene) -> None:
        self._scene = scene
        self._module = target.module
        told = dict(target.adaptation.variables)
        for text in told.values():
            scene.check(text)
        missing, sources = _missing(function_of(target.value), target.module)
        self.filled = {
            n: meaning
            for n in sorted(missing)
            if n not in names.IMPORTED and n not in told and (meaning := _meaning(n, sources))
        }
        self._told = told
        unknown = [n for n in sorted(missing) if n not in self.filled and n not in told]
        self._stand_in(unknown, target)
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
                f"give {proposals.options('--set', [name], None)}"
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
        for name, text in self._told.items():
            meaning = names.MEANINGS.get(text[1:], "") if text.startswith("@") else ""
            if self._is_due(name, meaning):
                self._write(name, self._scene.read(text))

    def _is_due(self, name: str, meaning: str) -> bool:
        if meaning in _LATER:
            return self._is_known(meaning)
        new = name not in self._written
        self._written.add(name)
        return new

    def _is_known(self, meaning: str) -> bool:
        needs = {"index": "step", "rate": "optimizer", "device": "model"}.get(meaning, meaning)
        return getattr(self._scene, needs) is not None

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
    own = {n for n, v in known.items() if n not in filled or v is not filled[n]}
    unbound = reached.read - reached.written
    missing = {n for n in unbound if n not in own and not hasattr(builtins, n)}
    return missing - {"__class__"}, reached.sources


class Reached:
    """What runs when a function or a class of a module is called, as far as it is the module's:
    the global names that it reads and binds, and its sources.
    """

    def __init__(self, value: Any, module: ModuleType) -> None:
        known = vars(module)
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.sources: list[Source] = []
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            reached = waiting.pop()
            self.sources.append(Source(reached))
            for code in _codes(reached, known):
                if id(code) in seen:
                    continue
                seen.add(id(code))
                globals_read, globals_written = _globals_of(code)
                self.read |= globals_read
                self.written |= globals_written
                called = [known[name] for name in code.co_names if name in known]
                waiting += [v for v in called if getattr(v, "__module__", None) == module.__name__]


@lru_cache(maxsize=1024)  # ranks that share a process load the same code again
def _globals_of(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that code reads, and those that it binds or deletes."""
    found = [(one.opname, one.argval) for one in dis.get_instructions(code)]

    def names(*operations: str) -> frozenset[str]:
        return frozenset(name for operation, name in found if operation in operations)

    return names("LOAD_GLOBAL", "LOAD_NAME"), names("STORE_GLOBAL", "DELETE_GLOBAL")


def own_globals(function: Callable[..., Any]) -> frozenset[str]:
    """The global names that a function binds itself."""
    return _globals_of(function.__code__)[1]


def _codes(value: Any, known: dict[str, Any]) -> Iterator[CodeType]:
    """The code objects of a function, of what is defined in it, and of a class's methods; of those
    only that see the module's names, `known`.
    """
    value = inspect.unwrap(value) if callable(value) else value
    functions: list[Callable[..., Any]] = []
    if inspect.isclass(value):
        members = vars(value).values()
        functions = [getattr(m, "__func__", getattr(m, "fget", m)) for m in members]
    else:
        functions = [getattr(value, "__func__", value)]
    own = [inspect.unwrap(f) for f in functions if callable(f)]
    own = [f for f in own if getattr(f, "__globals__", None) is known]
    waiting = [f.__code__ for f in own]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
