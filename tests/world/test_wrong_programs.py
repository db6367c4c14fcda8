"""Wrong programs are named with their cause and their lines, and their right twins are not accused.

Every run has one program of each class and cause in a simulated world; the sweep has all, and
those that a world of processes shows as well.
"""

from collections import Counter

import pytest

from distcheck import backends
from distcheck.worlds.pool import Pool
from tests.firsts import firsts
from tests.optional import needs
from tests.wrong_programs import PROGRAMS, Program
from tests.wrong_programs.running import named

_OFTEN = firsts(list(PROGRAMS.values()), lambda program: [program.kind, program.cause])
_PROVEN_S = 15.0  # on a crowded machine; on a quiet one it takes 0.6 s


def _programs() -> list[object]:
    return [
        pytest.param(p, id=p.name, marks=() if p in _OFTEN else pytest.mark.sweep)
        for p in PROGRAMS.values()
    ]


@pytest.mark.parametrize("program", _programs())
@needs("simulated")
def test_in_a_simulated_world(pool: Pool, program: Program) -> None:
    found = named(pool, program, wrong=True)
    assert found.cause == program.cause, found.said
    assert not found.missing_lines(program), found.said
    twin = named(pool, program, wrong=False)
    assert twin.finished, twin.said
    assert not twin.causes, twin.said


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "backend"),
    [(p.name, b) for b in ("gloo", "mpi") for p in PROGRAMS.values() if p.expected(b)],
)
def test_over_processes(pool: Pool, name: str, backend: str) -> None:
    if missing := backends.missing(backend):
        pytest.skip(missing)
    program = PROGRAMS[name]
    found = named(pool, program, wrong=True, backend=backend)
    assert found.cause == program.expected(backend), found.said
    assert found.seconds < _PROVEN_S
    twin = named(pool, program, wrong=False, backend=backend)
    assert twin.finished, twin.said


def test_the_set_has_every_class() -> None:
    kinds = Counter(program.kind for program in PROGRAMS.values())
    assert len(kinds) == 13
    assert min(kinds.values()) >= 5
    assert sum(kinds.values()) >= 75
    # No line is named of what no schedule controls.
    assert all(p.named or p.cause == "nondeterministic" for p in PROGRAMS.values())
