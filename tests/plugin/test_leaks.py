"""What a test leaves open in its ranks is told as a warning that names the test."""

from pathlib import Path

import pytest

from tests.plugin.running import run_warm

LEAKS = """
import asyncio, multiprocessing, threading, time
import pytest
import torch
import torch.distributed as dist
from torch.ops import _c10d_functional as functional

kept = []

def sleep():
    time.sleep(60)

class Sleeper:
    def __call__(self): sleep()

def test_before_any_world():
    # What the pytest process itself has open is none of the ranks'.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD.group_name
    kept.append(functional.all_reduce(torch.ones(1), "sum", group))
    dist.destroy_process_group()

@pytest.mark.world(2, reuse={reuse})
def test_group(world):
    kept.append(dist.new_group([0, 1]))

@pytest.mark.world(2, reuse={reuse})
def test_unwaited(world):
    # Rank 1 never takes part, so what rank 0 has begun cannot end.
    if world.rank == 0:
        kept.append(dist.all_reduce(torch.zeros(1), async_op=True))
    else:
        time.sleep(0.2)

@pytest.mark.world(2, reuse={reuse})
def test_thread(world):
    if world.rank == 1:
        thread = threading.Thread(target=time.sleep, args=(60,), name="my-thread")
        thread.start()

@pytest.mark.world(2, reuse={reuse})
def test_daemon(world):
    for name, target in (("my-daemon", sleep), ("sleeper", Sleeper())):
        threading.Thread(target=target, name=name, daemon=True).start()
    timer = threading.Timer(1000, sleep)
    timer.name, timer.daemon = "timer", True
    timer.start()

@pytest.mark.world(2, reuse={reuse})
def test_functional(world):
    kept.append(functional.all_reduce(torch.ones(1), "sum", world.group.group_name))

@pytest.mark.world(2, reuse={reuse})
def test_skips(world):
    if world.rank == 0:
        kept.append(dist.all_reduce(torch.zeros(1), async_op=True))
    pytest.skip("later")

@pytest.mark.world(2, reuse={reuse})
def test_nothing(world):
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == 2
    functional.wait_tensor(functional.all_reduce(ones, "sum", world.group.group_name))
    queue = multiprocessing.Queue()
    queue.put("its feeder runs on")
    threading.Thread(target=asyncio.new_event_loop().run_forever, daemon=True).start()
    ending = threading.Event()
    threading.Thread(target=lambda: ending.wait() and time.sleep(0.1), daemon=True).start()
    ending.set()
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()
    world.barrier()
"""

REPLAY = """
import pathlib
import pytest
from hypothesis import Phase, given, settings, strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

# Said in full: where the environment has CI, hypothesis keeps no examples by default.
kept = DirectoryBasedExampleDatabase("examples")

phases = [Phase.reuse, Phase.generate, Phase.shrink]

@settings(derandomize=False, database=kept, max_examples=200, phases=phases)
@given(n=st.integers(0, 10**6))
@pytest.mark.world(2)
def test_small(world, n):
    if world.rank == 0:
        with open("seen", "a") as seen:
            seen.write(f"{n}\\n")
    assert n < 4321
"""


def run(folder: Path, text: str, *options: str) -> str:
    ran = run_warm(folder, text, *options)
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("reuse", [False, True])
def test_leaks_are_told(tmp_path: Path, reuse: bool) -> None:
    text = run(tmp_path, LEAKS.format(reuse=reuse))
    assert "7 passed, 1 skipped" in text, text
    told = [line for line in text.splitlines() if "LeakWarning: " in line]
    expected = [
        "test_group left on rank 0, 1: 1 process group not destroyed",
        "test_unwaited left on rank 0: 1 collective not waited for (all_reduce)",
        "test_thread left on rank 1: 1 thread running (my-thread)",
        "test_daemon left on rank 0, 1: 3 threads running (my-daemon, sleeper, timer)",
        "test_functional left on rank 0, 1: 1 functional collective not waited for",
        "test_skips left on rank 0: 1 collective not waited for (all_reduce)",
    ]
    for line, part in zip(told, expected, strict=True):
        assert part in line, told


def test_a_leak_may_be_made_an_error(tmp_path: Path) -> None:
    text = run(tmp_path, LEAKS.format(reuse=False), "-k", "thread or skips", "-W", "error")
    assert "2 failed" in text, text
    assert "my-thread" in text


DIES = """
import os, signal, threading, time
import pytest

def sleep():
    time.sleep(60)

@pytest.mark.world(2)
def test_dies(world):
    if world.rank == 0:
        threading.Thread(target=sleep, daemon=True).start()
        pytest.skip("not here")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_leak_that_is_an_error_hides_no_rank_that_died(tmp_path: Path) -> None:
    text = run(tmp_path, DIES, "-W", "error")
    assert "test_dies - rank 1 of 2: killed (killed by SIGSEGV)" in text, text


@pytest.mark.sweep
def test_a_shrunk_example_is_tried_first_the_next_time(tmp_path: Path) -> None:
    """The pytest process finds, shrinks and keeps it; the ranks run it."""
    assert "n=4321" in run(tmp_path, REPLAY)
    (tmp_path / "seen").unlink()
    again = run(tmp_path, REPLAY)
    assert "n=4321" in again, again
    assert (tmp_path / "seen").read_text().split()[0] == "4321"
