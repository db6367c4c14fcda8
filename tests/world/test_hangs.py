"""Worlds of processes are not ended because one rank is late; those that hang are ended at once."""

import time

import pytest

from distcheck import backends
from distcheck.records.exit_status import RankEnd
from distcheck.worlds.pool import Pool
from tests.world import late_programs
from tests.world.launching import hang, run_to_end, start

MISSING = backends.missing("mpi")
NEEDS_MPI = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
_DEADLINE_S = 60.0
_OFTEN = [
    ("gloo", "late_in_a_group"), ("gloo", "counts_on_a_limit"),
    ("gloo", "counts_on_a_limit_of_a_call"), ("mpi", "waits_late"),
]  # fmt: skip


def programs(backend: str) -> list[object]:
    """All programs; those that are not run often, in the sweep only."""
    return [
        pytest.param(name, marks=() if (backend, name) in _OFTEN else pytest.mark.sweep)
        for name in late_programs.PROGRAMS
    ]


def check_not_accused(pool: Pool, name: str, backend: str) -> None:
    job = "tests.world.late_programs:runs"
    ranks = start(pool, job, 4, backend=backend, deadline_s=_DEADLINE_S, program=name)
    outcomes, _ = run_to_end(pool, ranks)
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes


@pytest.mark.parametrize("name", programs("gloo"))
def test_a_rank_that_is_late_is_not_accused(pool: Pool, name: str) -> None:
    check_not_accused(pool, name, "gloo")


@NEEDS_MPI
@pytest.mark.parametrize("name", programs("mpi"))
def test_a_rank_that_is_late_over_mpi_is_not_accused(pool: Pool, name: str) -> None:
    check_not_accused(pool, name, "mpi")


@NEEDS_MPI
@pytest.mark.sweep
def test_ranks_that_make_a_group_of_mpi_do_not_spin(pool: Pool) -> None:
    """One takes others for its members. A rank that spins has ten times as long as the deadline."""
    job, name = "tests.wrong_programs.running:runs", "groups_with_other_members"
    begun = time.monotonic()
    _, outcomes = hang(pool, job, 4, backend="mpi", program=name, wrong=True)
    assert time.monotonic() - begun < 10.0, "the deadline is one second"
    assert any("new_group" in outcome.detail for outcome in outcomes), outcomes
