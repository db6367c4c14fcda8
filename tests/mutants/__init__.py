"""Known-bad strategies and workloads, each with the checks that must catch it, and no others.

A mutant re-creates the mechanism of a bug that really happened, as small as it can be. It is
listed with `@mutant(...)`; test_mutants.py runs every one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mutant:
    """How to run a mutant and what must catch it.

    `caught` lists (check, layer) over all cases of the run: exactly those fail. `step` is the
    step of the first divergence. With `kind="workload"` the mutant is the workload and the
    strategy is the built-in allreduce.
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


ALL: list[Mutant] = []


def mutant(
    *,
    caught: str,
    workload: str = "mlp",
    world: int = 4,
    steps: int = 3,
    dtype: str | None = "float32",
    step: int = 0,
    kind: str = "strategy",
    exit_code: int = 1,
) -> Callable[[T], T]:
    """Registers a mutant. `caught` is written "gradients R, gradients S32, agreement"."""

    def register(target: T) -> T:
        named: Any = target
        pairs = frozenset(_pair(text.strip()) for text in caught.split(","))
        spec = f"{named.__module__}:{named.__qualname__}"
        ALL.append(Mutant(spec, pairs, workload, world, steps, dtype, step, kind, exit_code))
        return target

    return register


def _pair(text: str) -> tuple[str, str]:
    check, _, layer = text.rpartition(" ")
    return (check, layer) if layer in ("lattice", "X", "R", "S64", "S32") else (text, "-")
