"""Turns under xdist: bounded, given back, and never kept by a fork."""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from distcheck.machine.resources import cores
from distcheck.verification import run as verification
from distcheck.worlds import turns
from distcheck.worlds.turns import wait_for_turn

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
    monkeypatch.setattr(turns, "_shared", None)
    turns.take_turns(uuid.uuid4().hex, processes=turns_here() + 1)
    return turns_here() + 1


def test_no_more_at_once_than_there_are_turns() -> None:
    run, crowd = uuid.uuid4().hex, turns_here() + 3
    inside, enter = os.pipe()
    waiting, go = os.pipe()
    children = []
    for _ in range(crowd):
        child = os.fork()
        if child == 0:
            turns.take_turns(run, processes=crowd)
            os.write(enter, b"?")
            with wait_for_turn():
                os.write(enter, b"+")
                os.read(waiting, 1)
                os.write(enter, b"-")
            os._exit(0)
        children.append(child)
    said = b""
    while said.count(b"?") < crowd or said.count(b"+") < turns_here():
        said += os.read(inside, 100)
    time.sleep(0.3)  # in which the others look for a turn many times
    os.write(go, b"." * crowd)
    ends = [os.waitpid(child, 0)[1] for child in children]
    said += os.read(inside, 1000)
    for fd in (inside, enter, waiting, go):
        os.close(fd)
    at_once = [said[:n].count(b"+") - said[:n].count(b"-") for n in range(len(said) + 1)]
    assert max(at_once) == turns_here()
    assert ends == [0] * crowd, "every one had its turn"


@pytest.mark.parametrize("processes", [1, 2])
def test_enough_turns_need_no_waiting(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setattr(turns, "_shared", None)
    turns.take_turns("run", processes=processes)
    with wait_for_turn():
        assert not turns._held


def test_nobody_waits_where_names_are_refused(crowd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox."""

    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(socket, "socket", Refused)
    with wait_for_turn():
        assert not turns._held


def test_threads_take_turns_of_their_own(crowd: int) -> None:
    held = []

    def take() -> None:
        with wait_for_turn():
            held.append(len(turns._held))

    with wait_for_turn():
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(30)
        assert (held, len(turns._held)) == ([2], 1)


def test_a_turn_within_a_turn_is_the_same(crowd: int) -> None:
    """A test in a world may call verify, and others hold all the turns by then."""
    with wait_for_turn():
        held = list(turns._held)
        with wait_for_turn():
            assert turns._held == held
        assert turns._held == held
    assert not turns._held


def test_verify_takes_a_turn(crowd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(verification, "run_cases", lambda *_: held.append(len(turns._held)))
    verification.verify_cases([])
    assert held == [1]


def test_a_fork_does_not_keep_the_turn_of_its_parent(crowd: int) -> None:
    reading, writing = os.pipe()
    children = []
    for _ in range(turns_here()):
        with wait_for_turn():
            child = os.fork()
            if child == 0:
                os.close(writing)
                os.read(reading, 1)  # as a kept world's helper stays, until it is let go
                os._exit(0)
            children.append(child)
    got_it = threading.Event()

    def take() -> None:
        with wait_for_turn():
            got_it.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    os.close(writing)
    for child in children:
        os.waitpid(child, 0)
    os.close(reading)
    assert got_it.is_set()


@pytest.mark.sweep
def test_kept_worlds_in_more_processes_than_turns(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(KEPT)
    many = ["-n", str(turns_here() + 2)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *many],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert "32 passed" in ran.stdout, ran.stdout


def test_names_that_another_user_has_bound_are_not_waited_for_forever(
    crowd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names in use are visible to every user, and so are those that follow."""
    assert turns._shared is not None
    theirs = [socket.socket(socket.AF_UNIX) for _ in range(turns_here())]
    for number, one in enumerate(theirs):
        one.bind(f"\0distcheck-{turns._shared[0]}-{number}")
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.05)
    with wait_for_turn():
        assert not turns._held
    monkeypatch.setattr(turns, "_PATIENCE_S", 600.0)
    with wait_for_turn():  # at once
        assert not turns._held
    for one in theirs:
        one.close()
