"""Who has reached a check of the guard, by what ranks have left in the job's store."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from distcheck.job.guard import arrivals
from distcheck.job.guard.arrivals import Arrivals


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Arrivals]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(arrivals, "_PATIENCE_S", 0.0)
    return [Arrivals(SimpleNamespace(group_name="7"), place, 3) for place in range(3)]


def test_a_rank_that_was_killed_is_the_one_behind(ranks: list[Arrivals]) -> None:
    for rank in ranks:
        rank.arrive(2)
    ranks[0].arrive(100)
    assert ranks[0].missing(100) == {
        1: "its last check was after step 2", 2: "its last check was after step 2",
    }  # fmt: skip
    ranks[2].arrive(100)
    assert ranks[0].missing(100) == {1: "its last check was after step 2"}
    assert ranks[0].missing(2) == {}


def test_a_rank_that_has_ended_is_named_before_those_that_are_late(ranks: list[Arrivals]) -> None:
    ranks[0].arrive(2)
    ranks[1].made(1)
    ranks[1].end()
    assert ranks[0].missing(2) == {1: "its guard ended after step 1"}
    assert ranks[1].missing(2) == {}  # it reads no more
    ranks[2].arrive(2)
    assert ranks[2].missing(2) == {1: "its guard ended after step 1"}


def test_a_store_that_is_gone_says_nothing(
    ranks: list[Arrivals], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> bool:
        raise RuntimeError("the process that held it is gone")

    ranks[0]._store = SimpleNamespace(check=gone, set=gone)
    ranks[0].arrive(2)
    assert ranks[0].missing(2) == {}
    ranks[0].end()
