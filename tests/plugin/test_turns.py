"""Turns under xdist: bounded, given back, and never kept by a fork."""

import os
import select
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from distcheck import verification
from distcheck.cores import cores
from distcheck.worlds import turns
from distcheck.worlds.turns import turn

KEPT = """
import pytest
@pytest.mark.world(2, reuse=True)
@pytest.mark.parametrize("number", range(24))
def test_kept(world, number): assert world.gather(number) == [number] * 2

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(8))
def test_fresh(world, number): assert world.gather(number) == [number] * 2
"""


def turns_here() -> int:
    return max(2, cores())


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> int:
    """One process more than there are turns, in a test run of its own."""
    monkeypatch.setattr(turns, "_names", [])
    turns.share(uuid.uuid4().hex, processes=turns_here() + 1)
    return turns_here() + 1


def test_no_more_at_once_than_there_are_turns() -> None:
    run, crowd = uuid.uuid4().hex, turns_here() + 3
    inside, enter = os.pipe()
    waiting, go = os.pipe()
    children = []
    for _ in range(crowd):
        child = os.fork()
        if child == 0:
            turns.share(run, processes=crowd)
            with turn():
                os.write(enter, b"+")
                os.read(waiting, 1)
            os._exit(0)
        children.append(child)
    for _ in range(turns_here()):
        assert os.read(inside, 1) == b"+"
    one_more, _, _ = select.select([inside], [], [], 0.3)
    for _ in range(crowd):
        os.write(go, b".")
    ends = [os.waitpid(child, 0)[1] for child in children]
    for fd in (inside, enter, waiting, go):
        os.close(fd)
    assert not one_more
    assert ends == [0] * crowd, "every one had its turn"


@pytest.mark.parametrize("processes", [1, 2])
def test_nobody_waits_where_there_are_turns_for_all(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(turns, "_names", ["of the last run"])
    turns.share("run", processes=processes)
    assert not turns._names


def test_a_turn_within_a_turn_is_the_same(crowd: int) -> None:
    """A test in a world may call verify, and others hold all the turns by then."""
    with turn():
        held = list(turns._held)
        with turn():
            assert turns._held == held
        assert turns._held == held
    assert not turns._held


def test_verify_takes_a_turn(crowd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(verification, "run_cases", lambda cases, **_: held.append(len(turns._held)))
    verification.verify_cases([])
    assert held == [1]


def test_a_fork_does_not_keep_the_turn_of_its_parent(crowd: int) -> None:
    reading, writing = os.pipe()
    children = []
    for _ in range(turns_here()):
        with turn():
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)  # as a kept world's helper stays, until it is let go
                os._exit(0)
            children.append(child)
    got_it = threading.Event()

    def take() -> None:
        with turn():
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
