"""Tests in kept worlds."""

import logging
import os
import random
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.world(3, reuse=True)
PIDS = "KEPT_PIDS"
FOLDER = os.getcwd()


@pytest.fixture
def seven():
    return 7


@pytest.fixture
def product(world, seven):
    return world.rank * seven


@pytest.fixture
def cannot_be_sent():
    return lambda: None


def note(world):
    with open(os.path.join(os.environ[PIDS], str(world.rank)), "a") as file:
        file.write(f"{os.getpid()}\n")


def test_first(world, product, tmp_path, capsys, monkeypatch):
    print("hello")
    assert capsys.readouterr().out == "hello\n"
    monkeypatch.setenv("PATCHED", "1")
    (tmp_path / str(world.rank)).touch()
    world.barrier()
    assert len(list(tmp_path.iterdir())) == 3
    assert world.gather(product) == [0, 7, 14]
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEAKED"] = "1"
    os.chdir("/")
    sys.path.insert(0, "/leaked")
    dist.new_group([0, 1])
    note(world)


def drawn():
    """From the generators that a test uses without a thought."""
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def drawn_from(seed):
    """The same from generators of their own."""
    of_torch = torch.Generator().manual_seed(seed)
    of_numpy = np.random.RandomState(seed)
    return torch.rand(3, generator=of_torch).tolist(), random.Random(seed).random(), of_numpy.rand()


@pytest.mark.parametrize("number", range(20))
def test_everything_is_put_back(world, number):
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    assert not torch.are_deterministic_algorithms_enabled()
    assert not {"LEAKED", "PATCHED"} & set(os.environ)
    assert os.getcwd() == FOLDER
    assert "/leaked" not in sys.path
    assert len(dist.distributed_c10d._world.pg_map) == 1
    assert world.group is dist.group.WORLD
    assert (world.seed, drawn()) == (0, drawn_from(0))
    note(world)


@pytest.mark.world(3, reuse=True, seed=7)
def test_another_seed(world):
    assert (world.seed, drawn()) == (7, drawn_from(7))


def test_the_first_seed_again(world):
    assert (world.seed, drawn()) == (0, drawn_from(0))


@settings(max_examples=10, database=None)
@given(n=st.integers(0, 1000))
def test_examples(world, n):
    assert world.gather(n) == [n] * 3


def test_logs(world, caplog):
    logging.getLogger("mine").warning("rank %d", world.rank)
    assert caplog.messages == [f"rank {world.rank}"]
    assert caplog.text.endswith(f"rank {world.rank}\n")


@pytest.mark.filterwarnings("error::UserWarning")
def test_filters(world):
    with pytest.raises(UserWarning, match="an error here"):
        warnings.warn("an error here", stacklevel=1)


def test_filters_of_another_test(world):
    warnings.warn("no error here", stacklevel=1)


def test_properties(world, record_property):
    record_property("rank", world.rank)


def test_all_skip(world):
    pytest.skip("not here")


def test_cannot_be_sent(world, cannot_be_sent):
    pass


def test_same_ranks_so_far(world):
    note(world)


def test_fails(world):
    print("rank", world.rank)
    assert world.rank != 1
    dist.barrier()


def test_goes_on_in_a_new_world(world):
    assert world.gather(world.rank) == [0, 1, 2]
    note(world)
