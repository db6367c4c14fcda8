"""Where an MPI launcher of ours listens: on the loopback device alone, though it has no option."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from distcheck import backends
from distcheck.addons.mpi.started import MPIJob
from distcheck.worlds import keeper

MISSING = backends.missing("mpi")
LISTENS = """
import os, socket

from tests.waiting import wait_until
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"), (socket.AF_UNIX, "")):
    for _ in range(2):
        with socket.socket(family) as server:
            server.bind(address if family == socket.AF_UNIX else (address, 0))
            server.listen()
            inet = family != socket.AF_UNIX
            found = server.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
            assert found == (b"lo\\0" if inet else b""), (family, found)
"""


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def sockets(pid: int) -> list[socket.socket]:
    """Copies of the sockets of a process."""
    links = [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return [
        keeper.copy_of_socket(pid, int(link.name))
        for link in links
        if os.readlink(link).startswith("socket:")
    ]


def wait(launcher: "subprocess.Popen[bytes]", asks: int) -> int:
    front, theirs = socket.socketpair()
    with front, theirs, launcher:
        keeper._wait(os.getpid(), theirs, launcher, asks)
        return launcher.wait()


def test_a_program_that_listens_anywhere_listens_on_loopback() -> None:
    launcher, asks = keeper._start([sys.executable, "-c", LISTENS])
    assert asks is not None, "this kernel permits no filter: CI's does"
    assert wait(launcher, asks) == 0
    os.close(asks)


def test_what_it_starts_is_asked_about_too() -> None:
    inner = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    launcher, asks = keeper._start([sys.executable, "-c", inner, LISTENS])
    assert asks is not None
    assert wait(launcher, asks) == 0
    os.close(asks)


def test_without_a_filter_it_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_CALLS", {})
    launcher, asks = keeper._start([sys.executable, "-c", "raise SystemExit(7)"])
    with launcher:
        assert asks is None
        assert launcher.wait() == 7


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is an MPI")
def test_the_launcher_of_a_world_listens_on_loopback() -> None:
    job = MPIJob(2)
    try:
        assert job._keeper is not None
        (launcher,) = children(job._keeper.pid)
        listening: list[tuple[str, bytes]] = []
        while not listening:  # an Open MPI that listens nowhere needs no filter
            for each in sockets(launcher):
                with each:
                    inet = each.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        device = each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16)
                        listening.append((each.getsockname()[0], device))
        assert {device for _, device in listening} == {b"lo\0"}, listening
    finally:
        job.close()
