"""Many worlds in one pytest process: nothing adds up, whatever becomes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HELD = """
import contextlib, os, psutil, time

def held():  # descriptors, processes, bytes of memory that others could share
    me = psutil.Process()
    maps = [line.split() for line in open("/proc/self/maps")]
    bounds = [where.split("-") for where, mode, *_ in maps if mode.endswith("s")]
    mapped = sum(int(end, 16) - int(begin, 16) for begin, end in bounds)
    return me.num_fds(), len(me.children(recursive=True)), mapped

def shared_memory():  # without the folders of MPI jobs, of which there are none here
    found = set()
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):  # another's, who has just removed it
            status = entry.stat(follow_symlinks=False)
            if not entry.name.startswith("distcheck-mpi-"):
                found.add((entry.name, status.st_size, 512 * status.st_blocks))
    return found

def stays(files):  # the whole machine shares /dev/shm: what others made is theirs to remove
    end = time.monotonic() + 60
    while files and time.monotonic() < end:
        time.sleep(0.2)
        files &= shared_memory()
    return files
"""

MANY = (
    HELD
    + """
import os, psutil, pytest, torch, torch.distributed as dist

@pytest.mark.world(2)
def test_warm_up(world): dist.all_reduce(torch.ones(1))

def test_before(record): record += [held(), shared_memory()]

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(450))
def test_world(world, number):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(25))
def test_fails(world, number):
    assert world.rank == 0
    dist.barrier()

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(25))
def test_skips(world, number): pytest.skip("not here")

@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("number", range(50))
def test_kept(world, number):
    assert world.gather(number % 10) != [9, 9], "as fail the last ones, so that none is kept"

def test_after(record):
    assert held() == record[0]
    assert not stays(shared_memory() - record[1])

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

def test_before(record): record += [held(), shared_memory()]

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
    assert held() == record[0]
    assert not stays(shared_memory() - record[1])

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


@pytest.mark.sweep
def test_five_hundred_worlds_leave_nothing(tmp_path: Path) -> None:
    """Most of them pass; some fail or are skipped, and five are kept for ten tests each."""
    text = run(tmp_path, MANY, timeout_s=500)
    assert "30 failed, 498 passed, 25 skipped" in text, text[-3000:]


@pytest.mark.sweep
def test_worlds_that_end_badly_leave_nothing(tmp_path: Path) -> None:
    import random

    count = 300
    ends = ("pass", "kill", "exit", "raise", "hang", "segfault", "kill the helper")
    passing = sum(random.Random(n).choice(ends) == "pass" for n in range(count))
    text = run(tmp_path, ROUGH.replace("{count}", str(count)), timeout_s=2000)
    assert f"{count - passing} failed, {passing + 3} passed" in text, text[-3000:]
