"""Backend mpi, in worlds that a launcher knows of: what its collectives do, and how ranks end."""

import signal
from collections import Counter

import msgspec
import pytest
import torch
import torch.distributed as dist

from distcheck import backends
from distcheck.addons.mpi import library
from distcheck.testing.rank import WorldView
from distcheck.worlds.pool import Pool
from tests.addons.mpi.mpi_jobs import FLOATS, INTEGERS, SIZES, reducible
from tests.world.launching import hang, run

MISSING = backends.missing("mpi")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
WORLD = 3
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
MOVES = (
    "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "all_to_all",
    "all_to_all_single", "uneven all_to_all_single", "isend, irecv",
)  # fmt: skip


def compared(pool: Pool, job: str, *, world: int = WORLD) -> list[Counter[str]]:
    """What each rank has compared, and how often."""
    outcomes, results = run(
        pool, f"tests.addons.mpi.mpi_jobs:{job}", world, backend="mpi", deadline_s=60.0
    )
    assert [o.outcome for o in outcomes] == ["finished"] * world, outcomes[0].detail
    return [Counter(msgspec.msgpack.decode(result, type=list[str])) for result in results]


def test_every_reduction_of_every_dtype(pool: Pool) -> None:
    expected = {f"{c} {d} {op}": len(SIZES) for c in COLLECTIVES for d, op in reducible()}
    for counts in compared(pool, "reductions"):
        assert counts == {**expected, "integer AVG": 1, "float BAND": 1}


def test_every_move_of_every_dtype(pool: Pool) -> None:
    dtypes = (*FLOATS, *INTEGERS, "bool")
    expected = {f"{move} {dtype}": len(SIZES) for move in MOVES for dtype in dtypes}
    for counts in compared(pool, "moves"):
        assert counts == expected


def test_layouts_are_respected_or_refused(pool: Pool) -> None:
    for counts in compared(pool, "layouts"):
        assert counts["all_reduce transposed"] == counts["around every other"] == 1
        assert counts["expanded"] == counts["uneven"] == counts["sparse"] == 1
        assert counts.total() == 7 * (4 + WORLD) + 6 + 4


def test_work_that_is_waited_for_later(pool: Pool) -> None:
    first, second, third = compared(pool, "asynchronous")
    always = {"all_reduce": 3, "future": 1, "mixed": 1, "large ring": 1, "batched": 1}
    assert first == {**always, "any source": WORLD - 1}
    assert second == {**always, "short message": 1}
    assert third == always


def test_groups_of_some_ranks(pool: Pool) -> None:
    counts = compared(pool, "groups")
    assert [c.total() for c in counts] == [3 * 2 + 1, 3 * 2 + 1, 3 * 4 + 1]


def test_ddp_in_many_buckets(pool: Pool) -> None:
    for counts in compared(pool, "ddp"):
        assert counts == {"views False": 30, "views True": 30}


def test_a_collective_times_out(pool: Pool) -> None:
    assert [c.total() for c in compared(pool, "times_out", world=2)] == [1, 0]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_meet(pool: Pool, world: int) -> None:
    outcomes, results = run(pool, "everything_fine", world, backend="mpi")
    assert [o.outcome for o in outcomes] == ["finished"] * world
    facts = [msgspec.msgpack.decode(result) for result in results]
    assert {f["sum"] for f in facts} == {float(sum(range(world)))}
    assert len({f["parent"] for f in facts}) == 1, "all forked from the helper"


def test_a_rank_that_raises(pool: Pool) -> None:
    outcomes, _ = run(pool, "raises", 4, backend="mpi", culprit=2)
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, "raised")
    assert "ValueError: rank's own error" in outcomes[0].detail
    assert {o.outcome for o in outcomes[1:]} == {"ended"}
    assert any("all_reduce of [1], number 1, not finished at" in o.detail for o in outcomes[1:])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_rank_that_is_killed(pool: Pool, number: signal.Signals) -> None:
    outcomes, _ = run(pool, "killed", 3, backend="mpi", culprit=2, signal=int(number))
    assert (outcomes[0].rank, outcomes[0].outcome) == (2, "killed")
    assert number.name in outcomes[0].detail
    assert {o.outcome for o in outcomes[1:]} == {"ended"}


@pytest.mark.parametrize("code", [0, 7])
def test_an_exit_is_never_taken_for_success(pool: Pool, code: int) -> None:
    outcomes, _ = run(pool, "exits", 3, backend="mpi", culprit=1, code=code)
    assert (outcomes[0].rank, outcomes[0].outcome) == (1, "exited")


def test_a_hang_is_told_with_every_stack_and_the_last_collective(pool: Pool) -> None:
    outcomes = hang(pool, "hangs", 3, backend="mpi", culprit=1)[1]
    assert [o.outcome for o in outcomes] == ["hung"] * 3
    assert outcomes[0].rank == 1
    for waiting in outcomes[1:]:
        assert "last collective: all_reduce of" in waiting.detail
        assert "jobs.py" in waiting.detail


@pytest.mark.world(3, backend="mpi")
def test_a_marked_test(world: WorldView) -> None:
    total = torch.full((2,), float(world.rank))
    dist.all_reduce(total)
    assert (dist.get_backend(), total.tolist()) == ("distcheck_mpi", [3.0, 3.0])


@pytest.mark.world(2, backend="mpi", reuse=True)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_kept_world(world: WorldView, turn: int) -> None:
    total = torch.full((2,), float(turn))
    dist.all_reduce(total)
    assert total.tolist() == [2.0 * turn] * 2


def test_an_outer_launcher_is_not_ours(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    assert not {n for n in library.clean_environment() if n.startswith(("PMI", "SLURM"))}
    outcomes, _ = run(pool, "everything_fine", 2, backend="mpi")
    assert [o.outcome for o in outcomes] == ["finished"] * 2
