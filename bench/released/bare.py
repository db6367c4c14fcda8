"""Modules of a package without what it imports besides (clients, viewers, trainers, codecs)."""

import importlib
import importlib.util
import sys
import types
from typing import Any


def bare(name: str) -> Any:
    """A module of an installed package, whose parents are imported as empty packages."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        place = ".".join(parents[:depth])
        if place in sys.modules:
            continue
        found = importlib.util.find_spec(place)
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"{place} is not installed", name=place)
        empty = types.ModuleType(place)
        empty.__path__ = list(found.submodule_search_locations)
        sys.modules[place] = empty
    return importlib.import_module(name)


class _Absent(types.ModuleType):
    """Has every name, each of them an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":
            return []
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without(*names: str) -> None:
    """Modules of these names are empty in what is imported from now on."""
    for name in names:
        sys.modules.setdefault(name, _Absent(name))
