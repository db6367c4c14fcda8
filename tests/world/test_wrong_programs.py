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
from tests.wrong_programs.running import Named, named

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


def _over_processes() -> list[object]:
    pairs = [(p.name, b) for b in ("gloo", "mpi") for p in PROGRAMS.values() if p.expected(b)]
    often = [("skips_one", "gloo"), ("receives_first", "gloo")]
    return [pytest.param(*pair, marks=() if pair in often else pytest.mark.sweep) for pair in pairs]


def _named_over(pool: Pool, program: Program, backend: str) -> Named:
    if missing := backends.missing(backend):
        pytest.skip(missing)
    found = named(pool, program, wrong=True, backend=backend)
    assert found.causes == [program.expected(backend)], found.said
    assert found.seconds < _PROVEN_S
    return found


@pytest.mark.parametrize(("name", "backend"), _over_processes())
def test_over_processes(pool: Pool, name: str, backend: str) -> None:
    program = PROGRAMS[name]
    found = _named_over(pool, program, backend)
    assert "tests/wrong_programs/" in found.said
    twin = named(pool, program, wrong=False, backend=backend)
    assert twin.finished, twin.said


_REDUCE = "ranks 0, 1, 3 called all_reduce(SUM) of [64] float32 at "
_BROADCAST = "rank 2 called broadcast(root 2) of [64] float32 at "
_SIZES = (
    "ranks 0, 1, 3 called all_gather of [4] float32 at ",
    "rank 2 called all_gather of [5] float32 at ",
)


@pytest.mark.parametrize(
    ("name", "backend", "said"),
    [
        ("other_operation", "gloo", (_REDUCE, _BROADCAST)),
        # Open MPI completes it: the ranks hang later.
        ("other_operation", "mpi", (_BROADCAST,)),
        # Gloo aborts a rank that receives too much, and MPI raises there.
        ("other_shape", "gloo", _SIZES),
        ("other_shape", "mpi", _SIZES),
    ],
)
def test_both_lines_and_the_odd_rank_are_named(
    pool: Pool, name: str, backend: str, said: tuple[str, ...]
) -> None:
    found = _named_over(pool, PROGRAMS[name], backend)
    for text in (*said, "most ranks agree, and rank 2 made a different call"):
        assert text in found.said


def test_the_set_has_every_class() -> None:
    kinds = Counter(program.kind for program in PROGRAMS.values())
    assert len(kinds) == 13
    assert min(kinds.values()) >= 5
    assert sum(kinds.values()) >= 75
    # No line is named of what no schedule controls.
    assert all(p.named or p.cause == "nondeterministic" for p in PROGRAMS.values())
