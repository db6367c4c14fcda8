"""Many worlds in one pytest process: nothing adds up, whatever becomes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELD = """
import os, psutil, time

def held():
    me = psutil.Process()
    return me.num_fds(), len(me.children(recursive=True))

def shared_memory():  # without the folders of MPI jobs, of which there are none here
    return {name for name in os.listdir("/dev/shm") if not name.startswith("distcheck-mpi-")}

def stays(names):  # the whole machine shares /dev/shm: what others made is theirs to remove
    end = time.monotonic() + 60
    while names and time.monotonic() < end:
        time.sleep(0.2)
        names &= shared_memory()
    return names
"""

MANY = (
    HELD
    + """
import os, psutil, pytest, torch, torch.distributed as dist

@pytest.mark.world(2)
def test_warm_up(world): dist.all_reduce(torch.ones(1))

def test_before(record): record += [*held(), shared_memory()]

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(500))
def test_world(world, number):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2

def test_after(record):
    assert [*held()] == record[:2]
    assert not stays(shared_memory() - record[2])

@pytest.fixture(scope="session")
def record(): return []
"""
)

ROUGH = (
    HELD
    + """
import os, psutil, pytest, random, signal, time, torch, torch.distributed as dist

ENDS = ("pass", "kill", "exit", "raise", "hang", "segfault", "kill the helper")

@pytest.mark.world(2)
def test_warm_up(world): dist.all_reduce(torch.ones(1))

def test_before(record): record += [*held(), shared_memory()]

@pytest.mark.parametrize("number", range({count}))
@pytest.mark.world(3, deadline_s=1)
def test_world(world, number):
    draw = random.Random(number)
    end, rank, when = draw.choice(ENDS), draw.randrange(3), draw.random() * 0.02
    dist.all_reduce(torch.ones(1))
    if world.rank == rank:
        time.sleep(when)
        if end == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if end == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if end == "exit": os._exit(0)
        if end == "hang": time.sleep(1000)
        if end == "kill the helper": os.kill(os.getppid(), signal.SIGKILL); time.sleep(1000)
        assert end != "raise"
    dist.barrier()

def test_after(record):
    assert [*held()] == record[:2]
    assert not stays(shared_memory() - record[2])

@pytest.fixture(scope="session")
def record(): return []
"""
)


def run(folder: Path, text: str, *, timeout_s: float) -> str:
    (folder / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"],
        cwd=folder, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True,
        timeout=timeout_s,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_five_hundred_worlds_leave_nothing(tmp_path: Path) -> None:
    text = run(tmp_path, MANY, timeout_s=500)
    assert "503 passed" in text, text[-3000:]


@pytest.mark.sweep
def test_worlds_that_end_badly_leave_nothing(tmp_path: Path) -> None:
    import random

    count = 300
    ends = ("pass", "kill", "exit", "raise", "hang", "segfault", "kill the helper")
    passing = sum(random.Random(n).choice(ends) == "pass" for n in range(count))
    text = run(tmp_path, ROUGH.replace("{count}", str(count)), timeout_s=2000)
    assert f"{count - passing} failed, {passing + 3} passed" in text, text[-3000:]
