"""Who has reached a check of the guard, by what ranks have left in the job's store."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distcheck
from distcheck.job.guard import exchange
from distcheck.job.guard.exchange import Peers, RankProgress


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[RankProgress]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(exchange, "_PATIENCE_S", 0.0)
    return [RankProgress(store, place, 3) for place in range(3)]


def test_a_rank_that_was_killed_is_the_one_behind(ranks: list[RankProgress]) -> None:
    for rank in ranks:
        rank.arrive(2)
    ranks[0].arrive(100)
    assert ranks[0].missing(100) == {
        1: "its last check was after step 2", 2: "its last check was after step 2",
    }  # fmt: skip
    ranks[2].arrive(100)
    assert ranks[0].missing(100) == {1: "its last check was after step 2"}
    assert ranks[0].missing(2) == {}


def test_a_rank_that_has_ended_is_named_before_those_that_are_late(
    ranks: list[RankProgress],
) -> None:
    ranks[0].arrive(2)
    ranks[1].made(1)
    ranks[1].end()
    assert ranks[0].missing(2) == {1: "its guard ended after step 1"}
    assert ranks[1].missing(2) == {}  # it reads no more
    ranks[2].arrive(2)
    assert ranks[2].missing(2) == {1: "its guard ended after step 1"}


def test_a_lost_store_is_silent(ranks: list[RankProgress], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> bool:
        raise RuntimeError("the process that held it is gone")

    ranks[0]._store = SimpleNamespace(check=gone, set=gone)
    ranks[0].arrive(2)
    assert ranks[0].missing(2) == {}
    ranks[0].end()


@pytest.mark.world(3, reuse=True)
def test_a_guard_after_another_has_addresses_and_notes_of_its_own(world: Any) -> None:
    """Of two ranks of three: the third does not call."""
    group = dist.new_group([0, 1])
    for number in range(3 if world.rank < 2 else 0):
        peers = Peers(group, 20.0)
        assert peers.gather([10 * world.rank + number]) == [[number], [10 + number]]
        assert peers.arrivals is not None
        assert peers.arrivals._read("end", 1 - world.rank) == -1
        assert peers.gather_bytes(b"a" * (world.rank + 1), "sums") == [b"a", b"aa"]
        peers.close()


@pytest.mark.world(2)
def test_a_guard_ends_with_the_groups_of_its_script(world: Any) -> None:
    """Ranks that train on alone after that are not compared, and wait for none."""
    model = torch.nn.Linear(3, 1)
    model.load_state_dict({"weight": torch.ones(1, 3), "bias": torch.zeros(1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = distcheck.guard(optimizer, model=model, every=1, timeout_s=20.0)
    drawn = torch.Generator().manual_seed(world.rank)
    for step in range(3 + 2 * world.rank):
        if step == 2:
            dist.destroy_process_group()
        model(torch.randn(1, 3, generator=drawn)).sum().backward()
        for parameter in model.parameters() if step < 2 else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    assert guard.is_closed
    assert guard.checks == 2
