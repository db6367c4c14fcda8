"""Worlds of processes that hang are ended as soon as that is proven, and others are not."""

import pytest

from distcheck.judge.diagnosis.outcomes import explain
from distcheck.records import Outcome
from distcheck.records.ends import RankEnd
from distcheck.worlds.pool import Pool
from tests.world import hanging_jobs
from tests.world.launching import run_to_end, start

_DEADLINE_S = 60.0
_PROVEN_S = 15.0  # on a crowded machine; on a quiet one it takes 0.6 s


def sweep(*names: str) -> list[object]:
    """Programs for the sweep only."""
    return [pytest.param(name, marks=pytest.mark.sweep) for name in names]


def others(names: object, *quick: str) -> list[object]:
    assert isinstance(names, dict)
    return [*quick, *sweep(*(name for name in names if name not in quick))]


def ends_of(pool: Pool, program: str, *, wrong: bool) -> tuple[list[Outcome], float]:
    """How the four ranks end, and after how many seconds since they met."""
    job = "tests.world.hanging_jobs:runs"
    ranks = start(pool, job, 4, deadline_s=_DEADLINE_S, program=program, wrong=wrong)
    return run_to_end(pool, ranks)


@pytest.mark.parametrize("name", others(hanging_jobs.WRONG, "skips_one", "receives_first"))
def test_a_hang_is_named_long_before_the_deadline(pool: Pool, name: str) -> None:
    outcomes, spent_s = ends_of(pool, name, wrong=True)
    assert spent_s < _PROVEN_S
    (cause,) = explain(outcomes)
    expected = {
        "receives_first": "hang", "waits_for_a_send": "unmatched-message",
        "other_group_order": "hang",
    }.get(name, "collective-mismatch")  # fmt: skip
    assert cause.cause == expected
    if name not in ("other_shape", "other_dtype", "other_order_async"):  # gloo says so itself
        assert "hanging_jobs.py:" in cause.evidence


def test_both_lines_and_the_odd_rank_are_named(pool: Pool) -> None:
    (cause,) = explain(ends_of(pool, "other_operation", wrong=True)[0])
    assert cause.cause == "collective-mismatch"
    assert "ranks 0, 1, 3 called all_reduce(SUM) of [64] float32 at " in cause.evidence
    assert "rank 2 called broadcast(root 2) of [64] float32 at " in cause.evidence
    assert "most ranks agree, and rank 2 did something else" in cause.evidence


@pytest.mark.parametrize(
    "name", others({**hanging_jobs.WRONG, **hanging_jobs.RIGHT}, "_late_in_a_group")
)
def test_a_rank_that_is_late_is_not_accused(pool: Pool, name: str) -> None:
    outcomes, _ = ends_of(pool, name, wrong=False)
    assert {o.outcome for o in outcomes} == {RankEnd.FINISHED}, outcomes
