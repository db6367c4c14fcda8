"""Ranks meet without asking anybody but each other."""

import ctypes
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from distcheck.testing.rank import WorldView
from distcheck.worlds import linux

# A name server that never answers is on 127.0.0.1; it says how often it was asked.
ASKS_NOBODY = """
import socket, subprocess, sys
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
server.setblocking(False)
command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_world.py"]
print(subprocess.run(command, capture_output=True, text=True).stdout)
asked = 0
try:
    while server.recv(4096):
        asked += 1
except BlockingIOError:
    print(f"asked {asked} times")
"""
TEST = """
import pytest
@pytest.mark.world(3, deadline_s=30)
def test_meets(world): assert world.gather(world.rank) == [0, 1, 2]
"""


def test_no_name_server_is_asked_for_the_name_of_loopback(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    (tmp_path / "asks.py").write_text(ASKS_NOBODY)
    (tmp_path / "test_world.py").write_text(TEST)
    mount = " && ".join(
        f"mount --bind {name} /etc/{name}" for name in ("resolv.conf", "nsswitch.conf")
    )
    script = f"ip link set lo up && {mount} && exec {sys.executable} asks.py"
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "--net", "sh", "-c", script]
    try:
        ran = subprocess.run(unshared, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    except FileNotFoundError:
        pytest.skip("no unshare here, so no name server of its own")
    if re.search("^(unshare|mount|sh|ip):", ran.stderr, re.M):
        pytest.skip(f"no network of its own can be made here: {ran.stderr.strip()}")
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "asked 0 times" in ran.stdout


def test_names_are_looked_up_again_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bytes] = []

    def look_up(database: bytes, sources: bytes) -> None:
        given.append(sources)

    library = SimpleNamespace(__nss_configure_lookup=look_up)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with pytest.raises(RuntimeError), linux.without_name_servers():
        raise RuntimeError
    assert given[0] == b"files"
    assert given[1:] == [linux._configured_sources().encode()]


@pytest.mark.parametrize(
    ("configured", "expected"),
    [
        ("passwd: files\nhosts:  files mdns4 [NOTFOUND=return] dns # us\n",
         "files mdns4 [NOTFOUND=return] dns"),
        ("passwd: files\n#hosts: dns\n", "files dns"),
    ],
)  # fmt: skip
def test_name_origins(configured: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: configured)
    assert linux._configured_sources() == expected


def test_localhost_has_its_name_meanwhile() -> None:
    with linux.without_name_servers():
        assert socket.gethostbyname("localhost") == "127.0.0.1"
        with pytest.raises(socket.gaierror):
            socket.gethostbyname("nobody.invalid")


@pytest.mark.world(2)
def test_the_store_can_be_reached_by_its_ranks_alone(world: WorldView) -> None:
    """torch's store on a port answers to every user of the machine; a file in memory has no name,
    and what /proc shows of it only this user can open.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert os.readlink(store.path).startswith("/memfd:distcheck-store")
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)
    own = {connection.laddr for connection in psutil.Process().net_connections("tcp")
           if connection.status == psutil.CONN_LISTEN}  # fmt: skip
    assert not {place.port for place in own} & {address[1]}


@pytest.mark.world(2)
def test_the_store_has_what_code_asks_of_one(world: WorldView) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    peer = str(1 - world.rank)
    store.set(f"set/{world.rank}", "value")
    store.wait([f"set/{peer}"], timedelta(seconds=60))
    assert store.get(f"set/{peer}") == b"value"
    assert store.multi_get(["set/0", "set/1"]) == [b"value", b"value"]
    store.set(f"appended/{world.rank}", "value")
    store.append(f"appended/{world.rank}", "s")
    assert store.add(f"count/{world.rank}", 2) == 2
    store.set(f"own/{world.rank}", "values")
    assert store.compare_set(f"own/{world.rank}", "values", "x") == b"x"
    assert store.check([f"count/{world.rank}"])
    assert store.delete_key(f"count/{world.rank}")
    with pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.wait(["never"], timedelta(milliseconds=50))
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=60)) for _ in range(2)]
    assert [dist.get_rank(group) for group in groups] == [world.rank] * 2
