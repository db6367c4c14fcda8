"""Settings that a process has one of each, in Python and in torch: each rank of a simulated world
has its own.

Of a name in a module that all ranks share, and of an object, every rank has another value: lists
and dictionaries are copied for each. torch keeps its settings in C++, where they are set only if
the rank that runs now has others than the one before.
"""

import copy
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distcheck.machine import compat

# Names in modules; those that a release of Python or torch does not have are left out.
_NAMES: Mapping[str, Sequence[str]] = {
    "builtins": ("print", "input", "open", "__import__"),
    "logging": (
        "lastResort", "raiseExceptions", "_loggerClass", "_logRecordFactory",
        "_warnings_showwarning",
    ),
    "sys": (
        "argv", "path", "path_hooks", "meta_path", "excepthook", "displayhook", "stdin",
    ),
    "tempfile": ("tempdir",),
    "warnings": ("filters", "onceregistry", "defaultaction", "showwarning", "formatwarning"),
    **compat.PROCESS_WIDE,
}  # fmt: skip


class ProcessSettings:
    """Those of this process. What a rank has of its own is of no meaning elsewhere."""

    def __init__(self) -> None:
        self._modules = []
        for module, names in _NAMES.items():
            there = vars(sys.modules[module]) if module in sys.modules else {}
            if known := [name for name in names if name in there]:
                self._modules.append((there, known, operator.itemgetter(*known, known[0])))
        self._objects: list[Any] = [
            compat.groups_state(),
            logging.root,
            logging.root.manager,
            compat.print_options(),
        ]
        self._of_torch = compat.process_settings()
        self._now = self._torch_now()

    def beginning(self) -> Any:
        """The settings as they are now, for a rank to begin with."""
        names = [[_own(module[name]) for name in names] for module, names, _ in self._modules]
        others = [{n: _own(v) for n, v in vars(one).items()} for one in self._objects[1:]]
        return names, [compat.fresh_groups_state(), *others], self._torch_now()

    def take(self) -> Any:
        """Those of the rank that ran."""
        self._now = self._torch_now()
        values = [_values(module, names, get) for module, names, get in self._modules]
        return values, [one.__dict__ for one in self._objects], self._now

    def give(self, own: Any) -> None:
        """Sets those of the rank that runs now. Those of the last one have been taken."""
        values, objects, of_torch = own
        before = warnings.filters
        for (module, names, _), these in zip(self._modules, values, strict=True):
            module.update(zip(names, these, strict=False))
        for one, state in zip(self._objects, objects, strict=True):
            one.__dict__ = state
        if before != warnings.filters and (changed := getattr(warnings, "_filters_mutated", None)):
            changed()  # without it, what a place has warned of once stays silent
        if of_torch != self._now:
            for (_, put), value, is_now in zip(self._of_torch, of_torch, self._now, strict=True):
                if value is not None and value != is_now:
                    put(value)

    def _torch_now(self) -> list[Any]:
        try:
            return [get() for get, _ in self._of_torch]
        except RuntimeError:  # code has set torch's two interfaces for one thing apart
            return [_or_nothing(get) for get, _ in self._of_torch]


def _values(
    module: Mapping[str, Any], names: Sequence[str], get: Callable[[Any], tuple[Any, ...]]
) -> Sequence[Any]:
    try:
        return get(module)
    except KeyError:  # code has deleted one
        return [module.get(name) for name in names]


def _or_nothing(get: Callable[[], Any]) -> Any:
    with suppress(RuntimeError):
        return get()
    return None


def _own(value: Any) -> Any:
    """A value for one rank: containers are copied."""
    return copy.copy(value) if isinstance(value, dict | list | set) else value
