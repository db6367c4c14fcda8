"""Known-bad strategies and workloads, each with the checks that must catch it, and no others.

A mutant re-creates the mechanism of a bug that really happened, as small as it can be. It is
listed with `@mutant(...)`, and what its diagnosis must name is in causes.py; test_zoo.py runs every
one, and so does `distcheck selftest`, for which this package is installed as `distcheck_mutants`:
its files import each other relatively.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """How to run a mutant and what must catch it.

    `caught` lists (check, layer) over all cases of the run: exactly those fail. `step` is the
    step of the first divergence. With `kind="workload"` the mutant is the workload and the
    strategy is the built-in allreduce. A workload is given as ".file:name" where it is one of
    this package. `seldom` says that another mutant shows the same in the same way, so that the
    default test run can do without this one; `hangs`, that it is caught by its deadline;
    `separate`, that its rerun is in separate interpreters; `processes`, that it does nothing wrong
    where the ranks are threads of one process. `form` is its `--as`, where that has to be given.
    """

    spec: str
    caught: frozenset[tuple[str, str]]
    workload: str
    world: int
    steps: int
    dtype: str | None
    step: int
    kind: str
    exit_code: int
    accept: str | None = None
    seldom: bool = False
    without_data: tuple[int, ...] = ()
    hangs: bool = False
    separate: bool = False
    processes: bool = False
    form: str | None = None

    @property
    def name(self) -> str:
        """By which it is known, in causes.py and in reports."""
        return self.spec.rpartition(":")[2]

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of `distcheck.verify` that run it."""
        spec, workload = self.spec, self.workload
        if self.kind == "workload":
            spec, workload = "allreduce", self.spec
        return {
            "strategy": spec, "world": self.world, "workload": workload, "steps": self.steps,
            "dtype": self.dtype, "accept": self.accept, "without_data": self.without_data,
            "separate": self.separate, "form": self.form,
            "deadline_s": 3.0 if self.hangs else 10.0,
        }  # fmt: skip


ALL: list[Mutant] = []


def mutant(
    *, caught: str, workload: str = ".small:Small", world: int = 4, steps: int = 3,
    dtype: str | None = "float32", step: int = 0, kind: str = "strategy", exit_code: int = 1,
    accept: str | None = None, seldom: bool = False, without_data: tuple[int, ...] = (),
    hangs: bool = False, separate: bool = False, processes: bool = False, form: str | None = None,
) -> Callable[[T], T]:  # fmt: skip
    """Registers a mutant. `caught` is written "gradients rounding, gradients full batch float32,
    agreement".
    """

    def register(target: T) -> T:
        named: Any = target
        pairs = frozenset(_pair(text.strip()) for text in caught.split(","))
        spec = f"{named.__module__}:{named.__qualname__}"
        package = named.__module__.rpartition(".")[0]
        place = package + workload if workload.startswith(".") else workload
        asked = (place, world, steps, dtype, step, kind, exit_code, accept, seldom, without_data)
        ALL.append(Mutant(spec, pairs, *asked, hangs, separate, processes, form))
        return target

    return register


def everything() -> list[Mutant]:
    """Every mutant of every file, file by file. Imports torch."""
    for found in pkgutil.iter_modules(__path__):
        if not found.name.startswith("test_"):
            importlib.import_module(f"{__name__}.{found.name}")
    return list(ALL)


def _pair(text: str) -> tuple[str, str]:
    from distcheck.records.layers import LAYERS  # needs a library; listing mutants does not

    for layer in LAYERS:
        if text.endswith(f" {layer}"):
            return text.removesuffix(f" {layer}"), layer
    return text, "-"
