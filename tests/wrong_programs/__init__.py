"""Small programs of four ranks that misuse torch.distributed, each with its right twin.

A program is a function of the rank and of whether it is to be `wrong`. Its lines that end in
`# named` must be named by what judges it, in addition to the cause. The classes are those of MPI
BugBench, with groups, groups that are never destroyed, unusual calls, and two more: results that
depend on who is ready first, or on clocks. One module has those of one class:

parameters.py  ordering.py  deadlocks.py  buffers.py  works.py  races.py  buffering.py  groups.py
leaks.py  invalid.py  arrivals.py  clocks.py  odd.py

`running.py` runs them, for the tests and for bench/errors.py.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

WORLD = 4
ODD = 2  # the rank that does something else
LATE_S = 1.0  # longer than it takes to prove a hang
Run = Callable[[int, bool], object]


@dataclass(frozen=True)
class Program:
    """A wrong program and its right twin. `cause` is what must be named in a simulated world, and
    `on_gloo` and `on_mpi` in real ones: the same, or another cause, or nothing where it cannot be
    seen there, or only at the deadline. `schedules` is whether it takes a search of schedules to
    see it.
    """

    kind: str
    cause: str
    run: Run
    on_gloo: str
    on_mpi: str
    schedules: bool
    name: str = field(default="")

    def expected(self, backend: str) -> str:
        """The cause that must be named over a backend; or nothing."""
        return {"gloo": self.on_gloo, "mpi": self.on_mpi}.get(backend, self.cause)

    @property
    def named(self) -> list[str]:
        """The lines that must be named, as FILE:LINE."""
        lines, first = inspect.getsourcelines(self.run)
        file = inspect.getsourcefile(self.run)
        return [f"{file}:{first + place}" for place, line in enumerate(lines) if "# named" in line]


PROGRAMS: dict[str, Program] = {}


def wrong(
    kind: str, cause: str, *, on_gloo: str | None = None, on_mpi: str | None = None,
    schedules: bool = False,
) -> Callable[[Run], Run]:  # fmt: skip
    """Adds a program to the set."""

    def add(run: Run) -> Run:
        name = run.__name__  # type: ignore[attr-defined]
        assert name not in PROGRAMS, name
        seen = cause if on_gloo is None else on_gloo
        over_mpi = seen if on_mpi is None else on_mpi
        PROGRAMS[name] = Program(kind, cause, run, seen, over_mpi, schedules, name)
        return run

    return add


def late(rank: int, wrong: bool) -> None:
    """Has one rank of a right program come late, so that the others wait for it."""
    if rank == ODD and not wrong:
        time.sleep(LATE_S)


from tests.wrong_programs import (  # noqa: E402, F401, I001  they add their programs
    arrivals, buffering, buffers, clocks, deadlocks, groups, invalid, leaks, odd, ordering,
    parameters, races, works,
)  # fmt: skip
