"""Worlds of processes that hang are ended as soon as that is proven, and others are not."""

import time

import pytest

from distcheck import backends
from distcheck.judge.diagnosis.outcomes import explain
from distcheck.records import Outcome
from distcheck.records.exit_status import RankEnd
from distcheck.worlds.pool import Pool
from tests.world import hanging_jobs
from tests.world.launching import hang, run_to_end, start

MISSING = backends.missing("mpi")
NEEDS_MPI = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
_DEADLINE_S = 60.0
_PROVEN_S = 15.0  # on a crowded machine; on a quiet one it takes 0.6 s


def sweep(*names: str) -> list[object]:
    """Programs for the sweep only."""
    return [pytest.param(name, marks=pytest.mark.sweep) for name in names]


def others(names: object, *quick: str) -> list[object]:
    assert isinstance(names, dict)
    return [*quick, *sweep(*(name for name in names if name not in quick))]


def ends_of(
    pool: Pool, program: str, *, wrong: bool, backend: str = "gloo"
) -> tuple[list[Outcome], float]:
    """How the four ranks end, and after how many seconds since they met."""
    job = "tests.world.hanging_jobs:runs"
    about = {"program": program, "wrong": wrong}
    ranks = start(pool, job, 4, backend=backend, deadline_s=_DEADLINE_S, **about)
    return run_to_end(pool, ranks)


def cause_of(name: str) -> str:
    """The cause of a wrong program."""
    return {
        "receives_first": "hang", "waits_for_a_send": "unmatched-message",
        "other_group_order": "hang",
    }.get(name, "collective-mismatch")  # fmt: skip


@pytest.mark.parametrize("name", others(hanging_jobs.WRONG, "skips_one", "receives_first"))
def test_a_hang_is_named_long_before_the_deadline(pool: Pool, name: str) -> None:
    outcomes, spent_s = ends_of(pool, name, wrong=True)
    assert spent_s < _PROVEN_S
    (cause,) = explain(outcomes)
    assert cause.cause == cause_of(name)
    assert "hanging_jobs.py:" in cause.evidence


def test_both_lines_and_the_odd_rank_are_named(pool: Pool) -> None:
    (cause,) = explain(ends_of(pool, "other_operation", wrong=True)[0])
    assert cause.cause == "collective-mismatch"
    assert "ranks 0, 1, 3 called all_reduce(SUM) of [64] float32 at " in cause.evidence
    assert "rank 2 called broadcast(root 2) of [64] float32 at " in cause.evidence
    assert "most ranks agree, and rank 2 did something else" in cause.evidence


@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=NEEDS_MPI)])
def test_a_size_that_the_library_refuses_is_named_with_both_lines(pool: Pool, backend: str) -> None:
    """Gloo aborts a rank that receives too much, and MPI raises there."""
    outcomes, spent_s = ends_of(pool, "other_shape", wrong=True, backend=backend)
    assert spent_s < _PROVEN_S
    (cause,) = explain(outcomes)
    assert cause.cause == "collective-mismatch"
    assert "ranks 0, 1, 3 called all_gather of [4] float32 at " in cause.evidence
    assert "rank 2 called all_gather of [5] float32 at " in cause.evidence
    assert "most ranks agree, and rank 2 did something else" in cause.evidence


@NEEDS_MPI
@pytest.mark.parametrize("name", others(hanging_jobs.WRONG, "other_operation"))
def test_a_hang_over_mpi_is_named_as_over_gloo(pool: Pool, name: str) -> None:
    outcomes, spent_s = ends_of(pool, name, wrong=True, backend="mpi")
    assert spent_s < _PROVEN_S
    (cause,) = explain(outcomes)
    assert cause.cause == cause_of(name)
    assert "hanging_jobs.py:" in cause.evidence
    if name == "other_operation":  # which Open MPI completes: the ranks hang later
        assert "rank 2 called broadcast(root 2) of [64] float32 at " in cause.evidence
        assert "most ranks agree, and rank 2 did something else" in cause.evidence


@pytest.mark.parametrize(
    "name",
    others(
        {**hanging_jobs.WRONG, **hanging_jobs.RIGHT},
        "_late_in_a_group",
        "_counts_on_a_limit",
        "_counts_on_a_limit_of_a_call",
    ),
)
def test_a_rank_that_is_late_is_not_accused(pool: Pool, name: str) -> None:
    outcomes, _ = ends_of(pool, name, wrong=False)
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes


@NEEDS_MPI
@pytest.mark.parametrize(
    "name", others({**hanging_jobs.WRONG, **hanging_jobs.RIGHT}, "_waits_late")
)
def test_a_rank_that_is_late_over_mpi_is_not_accused(pool: Pool, name: str) -> None:
    outcomes, _ = ends_of(pool, name, wrong=False, backend="mpi")
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes


@NEEDS_MPI
@pytest.mark.sweep
def test_ranks_that_make_a_group_of_mpi_do_not_spin(pool: Pool) -> None:
    """One takes others for its members. A rank that spins has ten times as long as the deadline."""
    job, name = "tests.wrong_programs.running:runs", "groups_with_other_members"
    begun = time.monotonic()
    _, outcomes = hang(pool, job, 4, backend="mpi", program=name, wrong=True)
    assert time.monotonic() - begun < 10.0, "the deadline is one second"
    assert any("new_group" in outcome.detail for outcome in outcomes), outcomes
