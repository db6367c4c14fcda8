"""Kept worlds: the same processes, nothing carried over, a new world after a failure."""

import importlib
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distcheck.testing.rank import WorldView
from distcheck.testing.reused_rank import _Before
from distcheck.worlds import flight
from tests.plugin.running import run_warm
from tests.world import warm

EXAMPLES = Path(__file__).parent / "examples" / "test_kept.py"
PATIENCE = EXAMPLES.with_name("conftest.py")


def test_kept_worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (EXAMPLES, PATIENCE):
        shutil.copy(file, tmp_path)
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("KEPT_PIDS", str(pids))
    monkeypatch.setenv("COLUMNS", "120")
    done = warm.run(
        "-ra", "-p", "no:cacheprovider", "--tb=short",
        "--junitxml=results.xml", "-o", "junit_family=xunit1",
        cwd=tmp_path, timeout=240, program="pytest",
    )  # fmt: skip
    ran = pytest.RunResult(done.returncode, done.stdout.splitlines(), [], 0.0)
    ran.assert_outcomes(failed=2, passed=30, skipped=1, warnings=2)
    ran.stdout.fnmatch_lines(
        [
            "the arguments of the test cannot be sent to a reused world (cannot_be_sent: Can't *",
            "rank 1 of 3 failed:",
            "ranks 0, 2 of 3 lost a peer at *test_kept.py:* (last collective: barrier*",
            "*LeakWarning: *test_first left on rank 0, 1: 1 process group not destroyed",
            "FAILED *::test_fails - rank 1 of 3: assert 1 != 1",
        ]
    )
    results = (tmp_path / "results.xml").read_text()
    assert all(f'<property name="rank" value="{rank}" />' in results for rank in range(3))
    for rank in range(3):
        *kept, last = (pids / str(rank)).read_text().split()
        assert len(kept) == 22
        assert len(set(kept)) == 1, "one process for all tests"
        assert last != kept[0], "another one after a failure"


SEVERAL = """
import time
import pytest
import torch.distributed as dist

@pytest.mark.world([2, 3, 4, 5], reuse=True)
def test_sizes(world): assert world.gather(1) == [1] * world.size

@pytest.mark.world(2, reuse=True)
def test_older(world): pass

@pytest.mark.world(3, reuse=True)
def test_younger(world): pass

@pytest.mark.world(2, reuse=True, deadline_s=3)
def test_hangs(world):
    if world.rank:
        time.sleep(1000)
    dist.barrier()

@pytest.mark.world(2, reuse=True, deadline_s=2)
def test_skips_alone(world):
    if world.rank:
        pytest.skip("not here")
    dist.barrier()
"""


def test_a_younger_kept_world_does_not_hold_an_older_one(tmp_path: Path) -> None:
    """Its helper is forked while the older one's pipes and sockets are open here."""
    done = run_warm(tmp_path, SEVERAL, "--tb=short", "-W", "error")
    assert "2 failed, 6 passed" in done.stdout, done.stdout
    assert "last collective: barrier" in done.stdout, "ranks were asked, and answered"
    assert "if world.rank" in done.stdout or "time.sleep(1000)" in done.stdout
    alone = done.stdout.partition("___ test_skips_alone ___")[2]
    assert "rank 1 of 2 hung" not in alone
    assert "rank 1 of 2 had skipped (not here)" in alone
    assert done.stdout.index("rank 1 of 2 hung:") < done.stdout.index("rank 0 of 2 hung:")


SPOILED = """
import os, subprocess, time
import pytest, torch
import torch.distributed as dist

KEPT = pytest.mark.world(3, reuse=True, deadline_s=5)

def destroy(world):
    dist.destroy_process_group()

def replace(world):
    dist.destroy_process_group()
    where = f"file://{os.getcwd()}/meeting"
    dist.init_process_group("gloo", where, rank=world.rank, world_size=world.size)
    dist.new_group([0, 1])

def group_of_some(world):
    dist.new_group([0, 1], use_local_synchronization=True)

def right(world):
    dist.new_group([0, 1, 2])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 3

SPOIL = [destroy, replace, group_of_some]

@KEPT
@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("spoil", SPOIL)
def test_spoiled(world, spoil, then):
    right(world) if then else spoil(world)

@KEPT
def test_who_dies(world):
    if world.rank == 1:
        subprocess.run(["sh", "-c", f"(sleep 0.3; kill -9 {os.getpid()}) >/dev/null &"])

def test_between(): time.sleep(1.5)

@KEPT
def test_after_a_death(world):
    with open(f"before-{world.rank}", "w") as file:
        file.write(f"{os.getpid()}")
    right(world)

@pytest.mark.world(3, reuse=True, deadline_s=40)
@pytest.mark.parametrize("n", [0, 1])
def test_of_more_time(world, n):
    with open(f"pid-{world.rank}", "a") as file:
        file.write(f"{os.getpid()} ")
    right(world)

@KEPT
def test_of_less_time(world):
    test_of_more_time(world, 2)
"""


def test_what_the_next_test_would_meet_is_thrown_away(tmp_path: Path) -> None:
    ran = run_warm(tmp_path, SPOILED, "-W", "ignore", "--tb=short")
    assert "12 passed" in ran.stdout, ran.stdout
    for rank in range(3):
        (pid,) = set((tmp_path / f"pid-{rank}").read_text().split())
        assert pid != (tmp_path / f"before-{rank}").read_text(), "its collectives wait too short"


FORKS = """
import os, signal, subprocess
import pytest, torch
import torch.distributed as dist

KEPT = pytest.mark.world(2, reuse=True, deadline_s=20)

def note(name, world):
    with open(f"{name}-{world.rank}", "a") as file:
        file.write(f"{os.getpid()} ")

@KEPT
def test_first(world):
    note("one", world)
    os.umask(0o077)

@KEPT
def test_umask_is_put_back(world):
    note("one", world)
    assert os.umask(0o022) == MASK

@KEPT
def test_an_alarm_is_set(world):
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.5)

@KEPT
def test_the_alarm_is_gone(world):
    note("one", world)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL

@KEPT
def test_a_fork_comes_back(world):
    note("parents", world)
    child = os.fork()
    if child:
        os.waitpid(child, 0)  # it ran on to the end of this test, as if it were the rank

@KEPT
def test_after_a_fork(world):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2

@KEPT
def test_a_process_goes_on(world):
    note("left", world)
    subprocess.Popen(["sleep", "1000"])

@KEPT
def test_in_another_world(world):
    note("next", world)
"""


def test_processes_and_umask_do_not_reach_the_next_test(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    ran = run_warm(tmp_path, FORKS.replace("MASK", str(mask)), "--tb=short")
    assert "8 passed" in ran.stdout, ran.stdout
    assert "LeakWarning: test_it.py::test_a_process_goes_on left on rank 0" in ran.stdout
    assert ": 1 process running (sleep" in ran.stdout, ran.stdout
    for rank in range(2):
        (one,) = set((tmp_path / f"one-{rank}").read_text().split())
        assert (tmp_path / f"left-{rank}").read_text().split() == [one], "kept until then"
        assert (tmp_path / f"next-{rank}").read_text().split() != [one]


SLOWER = """
import datetime, time
import pytest, torch
import torch.distributed as dist

@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("n", [0, 1])
def test_one_is_through_first(world, n):
    group = dist.new_group([0, 1])
    if world.rank == 1:
        time.sleep(0.3)
        open_still = dist.irecv(torch.ones(1), 0, group=group)
        with pytest.raises(RuntimeError, match="Timed out"):  # not: connection closed by peer
            open_still.wait(datetime.timedelta(seconds=0.5))
    assert len(dist.distributed_c10d._world.pg_map) == 2, "the last test's group is gone"
"""


def test_a_group_lives_until_the_last_rank_is_through_with_it(tmp_path: Path) -> None:
    ran = run_warm(tmp_path, SLOWER, "-W", "ignore", "--tb=short")
    assert "2 passed" in ran.stdout, ran.stdout


MANY = """
import os
import pytest

def made(size):
    @pytest.mark.world(size, reuse=True)
    def test(world): assert sum(world.gather(1)) == size
    return test

def counted():
    def test():
        with open("fds", "a") as file:
            file.write(f"{len(os.listdir('/proc/self/fd'))} ")
    return test

for n in range(7):  # each throws one away that still lives
    globals()[f"test_{n}"] = made(1 + n % 2)
    globals()[f"test_counted_{n}"] = counted()
test_big = made(27)
"""


def test_kept_worlds_that_are_thrown_away_leave_no_descriptor(tmp_path: Path) -> None:
    """The last has more ranks than descriptors go in one message."""
    ran = run_warm(tmp_path, MANY, "--tb=short")
    assert "15 passed" in ran.stdout, ran.stdout
    counts = (tmp_path / "fds").read_text().split()
    assert counts[1:3] == counts[3:5] == counts[5:7], counts


def test_determinism_is_put_back() -> None:
    """Here and not on ranks, each of which would import for seconds what it needs."""
    before = _Before()
    with before.put_back():
        torch.use_deterministic_algorithms(True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("number", range(3))
def test_a_test_knows_its_own_collectives_alone(world: WorldView, number: int) -> None:
    """Reading out those of all tests before would take longer than the test."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    if not hasattr(c10d, "_reset_fr_trace"):
        pytest.skip("this torch forgets no collectives; 2.15 does")
    assert flight.latest() == ()
    for _ in range(3):
        dist.all_reduce(torch.ones(number + 1))
    assert [entry.shapes for entry in flight.latest()] == [str(number + 1)] * 3


class _InACycle:
    def __init__(self) -> None:
        self.itself = self


_left_behind: list["weakref.ref[_InACycle]"] = []


@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("number", range(3))
def test_garbage_of_a_test_is_destroyed_before_the_next(world: WorldView, number: int) -> None:
    """Not within a collective of the next one, where its destructor could block."""
    assert [ref for ref in _left_behind if ref() is not None] == []
    _left_behind.append(weakref.ref(_InACycle()))
