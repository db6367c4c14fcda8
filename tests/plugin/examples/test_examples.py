"""Examples of tests in worlds, good and bad; tests/plugin/test_outcomes.py says how each ends."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def seven():
    return 7


@pytest.fixture
def product(world, seven):
    """Set up on every rank, because it asks for `world`."""
    yield world.rank * seven
    with open(os.environ.get("TEARDOWNS", os.devnull), "a") as file:
        file.write("x")


@pytest.mark.world(4)
def test_sum(world, product, tmp_path):
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    assert total.item() == 6
    (tmp_path / str(world.rank)).touch()
    world.barrier()
    assert len(list(tmp_path.iterdir())) == 4, "tmp_path is shared"
    assert world.gather(product) == [0, 7, 14, 21]


@pytest.mark.world(3)
def test_view(world, tmp_path):
    assert (world.size, world.seed, world.device) == (3, 0, torch.device("cpu"))
    assert world.gather(world.rank) == [0, 1, 2]
    assert world.group is dist.group.WORLD
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total, group=world.group)
    assert total.item() == 3
    if world.rank == 2:
        time.sleep(0.2)
        (tmp_path / "late").touch()
    world.barrier()
    assert (tmp_path / "late").exists()


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes(world, offset):
    assert world.gather(world.rank + offset) == list(range(offset, world.size + offset))


@pytest.mark.world(4)
def test_one_rank_fails(world):
    mine = {"rank": world.rank, "value": 3}
    if world.rank == 2:
        print("I am two")
        assert mine == {"rank": 2, "value": 4}
    dist.all_reduce(torch.ones(1))


@pytest.mark.world(3)
def test_all_fail_alike(world):
    assert [world.rank, 1] == [9, 1]


@pytest.mark.world(2)
def test_each_fails_its_own_way(world):
    if world.rank == 1:
        raise KeyError("from one")
    try:
        dist.barrier()
    except RuntimeError:  # rank 1 is gone: what follows is the later failure, and not for that
        raise ValueError("from zero") from None


@pytest.mark.world(3)
def test_output_is_folded(world):
    print("printed by rank 1" if world.rank == 1 else "printed by the others")
    logging.getLogger("mine").warning("logged by all")
    dist.barrier()
    pytest.fail("for its output to be shown")


@pytest.mark.world(3, deadline_s=3)
def test_deadlock(world):
    if world.rank != 0:
        dist.barrier()
    else:
        time.sleep(1000)


@pytest.mark.world(2, deadline_s=2)
def test_one_skips_and_is_waited_for(world):
    if world.rank == 1:
        pytest.skip("not here")
    dist.barrier()


class NoText(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.world(2)
def test_exception_without_text(world):
    raise NoText


@pytest.mark.world(2)
def test_no_utf8(world):
    assert "\udcff" == "x"


@pytest.mark.world(2)
def test_debugger(world):
    breakpoint()


@pytest.mark.world(3)
def test_segfault(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@pytest.mark.world(2)
def test_segfault_after_the_last_collective(world):
    dist.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.world(2)
def test_killed(world):
    dist.all_reduce(torch.ones(7))
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.barrier()


@pytest.mark.world(2)
def test_aborts(world):
    if world.rank == 1:
        os.abort()
    dist.all_reduce(torch.ones(5))


@pytest.mark.world(2)
def test_leaves_with_success(world):
    dist.all_reduce(torch.ones(3))
    if world.rank == 1:
        os._exit(0)


@pytest.mark.world(2)
def test_sys_exit(world):
    sys.exit(0)


@pytest.mark.world(2)
def test_pytest_fail(world):
    pytest.fail("by request")


@pytest.mark.world(2)
def test_all_skip(world):
    pytest.skip("not here")


@pytest.mark.world(2)
def test_one_skips(world):
    if world.rank == 1:
        pytest.skip("not here")


@pytest.mark.world(2)
@pytest.mark.xfail(raises=ValueError, strict=True)
def test_xfail_by_type(world):
    raise ValueError("known")


@pytest.mark.world(2)
@pytest.mark.xfail(raises=KeyError, strict=True)
def test_xfail_of_another_type(world):
    raise ValueError("unknown")


@pytest.mark.world(2)
def test_xfail_inside(world):
    if world.rank == 0:
        pytest.xfail("known")
    dist.barrier()


@pytest.mark.world(2)
def test_raises(world):
    with pytest.raises(RuntimeError, match="mine"):
        raise RuntimeError(f"mine, {world.rank}")


@pytest.mark.world(2)
def test_captures(world, capsys, caplog):
    print("hello from", world.rank)
    assert capsys.readouterr().out == f"hello from {world.rank}\n"
    logging.getLogger("mine").warning("rank %d", world.rank)
    assert [r.getMessage() for r in caplog.records] == [f"rank {world.rank}"]


@pytest.mark.world(2)
def test_captures_descriptors(world, capfd):
    os.write(1, b"raw %d" % world.rank)
    assert capfd.readouterr().out == f"raw {world.rank}"


@pytest.mark.world(2)
def test_warns(world):
    warnings.warn("on every rank", stacklevel=1)


@pytest.mark.world(2)
def test_leaks(world):
    dist.new_group([0, 1])


@pytest.mark.world(2)
def test_a_process_left_behind(world):
    if world.rank == 1:
        subprocess.Popen(["sleep", os.environ["LEFT_S"]], start_new_session=True)


@pytest.mark.world(2)
def test_isolated_writes(world):
    torch.set_default_dtype(torch.float64)
    os.environ["LEAKED"] = "1"


@pytest.mark.world(2)
def test_isolated_reads(world):
    assert torch.get_default_dtype() == torch.float32
    assert "LEAKED" not in os.environ


def drawn():
    """From the generators that a test uses without a thought."""
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def drawn_from(seed):
    """The same from generators of their own."""
    of_torch = torch.Generator().manual_seed(seed)
    of_numpy = np.random.RandomState(seed)
    return torch.rand(3, generator=of_torch).tolist(), random.Random(seed).random(), of_numpy.rand()


@pytest.mark.world(2)
def test_seeded(world):
    assert drawn() == drawn_from(0)
    assert torch.get_num_threads() == 1


@pytest.mark.world(2, seed=7)
def test_seeded_otherwise(world):
    assert world.seed == 7
    assert drawn() == drawn_from(7) != drawn_from(0)


@pytest.mark.world(2)
@settings(max_examples=10, database=None)
@given(n=st.integers(0, 1000))
def test_hypothesis_shrinks(world, n):
    assert world.gather(n) == [n, n]
    assert n < 100


@pytest.mark.world(2)
@given(data=st.data())
def test_hypothesis_data(world, data):
    data.draw(st.integers())


@pytest.mark.world(2)
async def test_coroutine(world):
    raise AssertionError("never awaited")


def test_without_marker(world):
    raise AssertionError("never run")


@pytest.fixture
def world_unseen(request):
    return request.getfixturevalue("world")


@pytest.mark.world(2)
def test_world_unseen(world_unseen):
    raise AssertionError("never run")


class TestMethods:
    @pytest.mark.world(2)
    def test_method(self, world):
        assert isinstance(self, TestMethods)
        assert world.size == 2
