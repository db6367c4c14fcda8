"""Turns under xdist: bounded, given back, and never kept by a fork."""

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from distcheck.testing.turns import turn

KEPT = """
import pytest
@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("number", range(24))
def test_kept(world, number): assert world.gather(number) == [number] * 2

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(8))
def test_fresh(world, number): assert world.gather(number) == [number] * 2
"""


def config(processes: int) -> Any:
    return SimpleNamespace(workerinput={"workercount": processes, "testrunuid": uuid.uuid4().hex})


def turns_here() -> int:
    return max(2, len(os.sched_getaffinity(0)))


def test_no_more_at_once_than_there_are_turns() -> None:
    crowd = turns_here() + 3
    shared, running, most = config(crowd), 0, 0
    lock, full = threading.Lock(), threading.Event()

    def work() -> None:
        nonlocal running, most
        with turn(shared):
            with lock:
                running += 1
                most = max(most, running)
                if running == turns_here():
                    full.set()
            full.wait(10)
            with lock:
                running -= 1

    threads = [threading.Thread(target=work) for _ in range(crowd)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "every one had its turn"
    assert most == turns_here()


def test_a_fork_does_not_keep_the_turn_of_its_parent() -> None:
    shared = config(turns_here() + 1)
    reading, writing = os.pipe()
    children = []
    for _ in range(turns_here()):
        with turn(shared):
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)  # as a kept world's helper stays, until it is let go
                os._exit(0)
            children.append(child)
    got_it = threading.Event()

    def take() -> None:
        with turn(shared):
            got_it.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    os.close(writing)
    for child in children:
        os.waitpid(child, 0)
    os.close(reading)
    assert got_it.is_set()


def test_kept_worlds_in_more_processes_than_turns(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(KEPT)
    many = ["-n", str(turns_here() + 2)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *many],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert "32 passed" in ran.stdout, ran.stdout
