"""Right programs of unusual forms: none may be accused, by the default run or any other.

Each forms the mean over all samples, for unequal shards too. `bench/zoo.py` runs them beside the
subtle mutants; test_unusual.py runs some of them, and all behind the sweep marker.
"""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Right:
    """A right program: how it is loaded, and its class."""

    spec: str
    group: str

    @property
    def name(self) -> str:
        """By which it is known in reports."""
        return self.spec.rpartition(":")[2]


ALL: list[Right] = []


def right(target: T) -> T:
    """Registers a right program."""
    named: Any = target
    module: str = named.__module__
    ALL.append(Right(f"{module}:{named.__qualname__}", module.rpartition(".")[2]))
    return target


def everything() -> list[Right]:
    """Every right program, file by file. Imports torch."""
    for found in pkgutil.iter_modules(__path__):
        if not found.name.startswith("test_"):
            importlib.import_module(f"{__name__}.{found.name}")
    return list(ALL)
