"""Subtle mutants: wrong programs that look right, and that simple models do not show.

The mutants beside this package are each run where a check must catch them. These ask another
question: does the default run (`distcheck verify --strategy X --world 4`) see them? Each file is a
class of mistake, and each mutant has a witness: a small model of `witnesses.py`, a cell or another
workload at which it must fail. The witness proves that the program is wrong, and is what the tests
and `distcheck selftest` run. `bench/zoo.py` runs the default run and counts.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")

# What is needed to see a mutant at all:
#   default    a run at world 4 with a model of the size of a small one
#   thorough   a cell of `--thorough`
#   worlds     another world than 4
#   apart      ranks that were not forked from one process, with the environment of two machines
#   machines   more than one machine
#   size       a model that is large: over 25 MB in one tensor, or over 2^24 elements
#   inherent   more steps than a test runs, numbers that training does not have, or luck
Reach = Literal["default", "thorough", "worlds", "apart", "machines", "size", "inherent"]


@dataclass(frozen=True)
class Subtle:
    """A wrong program, what shows it, and the run that proves it wrong.

    needs      what a model or a run must have to show it
    reach      which kind of run has that
    witness    the arguments of `distcheck.verify` that show it; None where no run here does
    after      the public report whose mechanism it re-creates
    exit_code  of the witness: 1 where a check fails, 4 where a rank crashes, hangs or disagrees
    """

    spec: str
    group: str
    wrong: str
    needs: str
    reach: Reach
    witness: dict[str, Any] | None
    after: str | None
    exit_code: int

    @property
    def name(self) -> str:
        """By which it is known in reports."""
        return self.spec.rpartition(":")[2]

    @property
    def asked(self) -> dict[str, Any] | None:
        """The arguments of `distcheck.verify` that run it with its witness."""
        return None if self.witness is None else {"strategy": self.spec, **self.witness}


ALL: list[Subtle] = []


def subtle(
    *, needs: str, witness: str | None = ".witnesses:Kinds", reach: Reach = "default",
    world: int = 4, steps: int = 2, batch: int = 256, dtype: str | None = "float32",
    after: str | None = None, exit_code: int = 1,
) -> Callable[[T], T]:  # fmt: skip
    """Registers a mutant. A witness is written ".witnesses:Kinds", or is a workload's name."""

    def register(target: T) -> T:
        named: Any = target
        package, _, group = named.__module__.rpartition(".")
        place = None if witness is None else witness
        if place is not None and place.startswith("."):
            place = package + place
        run = {
            "world": world, "workload": place, "steps": steps, "batch": batch, "dtype": dtype,
            "deadline_s": 10.0,
        }  # fmt: skip
        found = Subtle(
            spec=f"{named.__module__}:{named.__qualname__}", group=group,
            wrong=" ".join(named.__doc__.split("\n\n")[0].split()), needs=needs, reach=reach,
            witness=None if place is None else run, after=after, exit_code=exit_code,
        )  # fmt: skip
        ALL.append(found)
        return target

    return register


def everything() -> list[Subtle]:
    """Every subtle mutant, class by class. Imports torch."""
    for found in pkgutil.iter_modules(__path__):
        if not found.name.startswith("test_"):
            importlib.import_module(f"{__name__}.{found.name}")
    return list(ALL)
