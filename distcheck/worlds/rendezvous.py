"""Connects the ranks of a world through a store.

If one front end forks all ranks, the store is a file in memory, whose descriptor the ranks inherit.
Ranks of several processes meet at a TCPStore. The front end binds port 0, on loopback unless ranks
are on other machines, and passes the listening socket to rank 0, which serves the store on it. The
kernel queues early connections, so there is no race for a port.
"""

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from distcheck import backends, registry
from distcheck.worlds import call_recorder, linux

_MARGIN_S = 120.0
_LOOK_EVERY_S = 0.0005


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Rendezvous of one rank. `deadline_s` is the deadline of the world. Collectives have a longer
    timeout, so that the front end observes a hang, with the stack of every rank, before it becomes
    a timeout.
    """

    backend: str
    rank: int
    world: int
    host: str
    port: int
    deadline_s: float
    in_memory: bool = False  # True if the store is a file that every rank inherits


@contextlib.contextmanager
def rendezvous_endpoint(host: str, *, in_memory: bool) -> Iterator[tuple[str, int, int]]:
    """Yield the host, the port and a file descriptor for the ranks' store. With `in_memory`, the
    descriptor is that of a file in memory. Otherwise it is that of a socket that listens at this
    address; rank 0 serves the store on it.

    Only processes that inherit the file can open it. Every user of this machine can connect to the
    socket, because torch's store has no authentication.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((host, 0))
        place, port = server.getsockname()[:2]
        if not in_memory:
            server.listen(1024)
            yield place, port, server.fileno()
            return
        store = os.memfd_create("distcheck-store")
        try:
            yield place, port, store
        finally:
            os.close(store)


def environment_of(rendezvous: Rendezvous, *, nodes: int = 1) -> dict[str, str]:
    """Return the environment variables that launchers set and that code under test may read, as if
    the ranks were on `nodes` machines with equally many ranks each.
    """
    local_world = rendezvous.world // nodes
    return {
        "RANK": str(rendezvous.rank),
        "LOCAL_RANK": str(rendezvous.rank % local_world),
        "WORLD_SIZE": str(rendezvous.world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(rendezvous.rank // local_world),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
    }


def enter_world_of_one() -> None:
    """Create a process group of world size 1 and set the variables of a launcher, for code under
    test.
    """
    import torch.distributed as dist

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def join(rendezvous: Rendezvous, store_fd: int, *, registered: str = "") -> Any:
    """Create the default process group. Return the `torch.distributed.Store` of the rendezvous.
    `store_fd` comes from `rendezvous_endpoint`. `registered` is torch's name of the backend, if the
    backend is already registered.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=10 * rendezvous.deadline_s + _MARGIN_S)
    usual_limit_s = min(timeout, _torchs_timeout()).total_seconds()
    if backends.name_of(rendezvous.backend) == "simulated":
        return registry.load("simulated").join_world(rendezvous, timeout, usual_limit_s)
    call_recorder.install(usual_limit_s)
    store = _store(rendezvous, store_fd, timeout)
    registered = registered or backends.register(rendezvous.backend)
    backends.note_calls(rendezvous.backend, registered)
    dist.init_process_group(
        registered,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=timeout,
    )
    _see_all_join(store, rendezvous)
    return store


def _store(rendezvous: Rendezvous, store_fd: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    if rendezvous.in_memory:
        file = dist.FileStore(f"/proc/self/fd/{store_fd}", -1)  # type: ignore[attr-defined]
        file.set_timeout(timeout)
        return file
    serving = rendezvous.rank == 0
    if not serving:
        os.close(store_fd)
    with linux.without_name_servers() if _is_number(rendezvous.host) else contextlib.nullcontext():
        return dist.TCPStore(  # type: ignore[attr-defined]
            rendezvous.host,
            rendezvous.port,
            rendezvous.world,
            serving,
            timeout,
            wait_for_workers=False,
            master_listen_fd=store_fd if serving else None,
        )


def wait_for(store: Any, keys: Sequence[str]) -> None:
    """Wait until the store contains all keys. A FileStore is polled here, because torch sleeps 10
    ms per poll.
    """
    while _is_file(store) and not store.check(keys):
        time.sleep(_LOOK_EVERY_S)
    store.wait(keys)


def _is_file(store: Any) -> bool:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return isinstance(getattr(store, "underlying_store", store), FileStore)  # or in a PrefixStore


def _torchs_timeout() -> timedelta:
    from torch.distributed.constants import default_pg_timeout

    return default_pg_timeout


def _see_all_join(store: Any, rendezvous: Rendezvous) -> None:
    """Wait until every rank has created its group. gloo may return on one rank while others are
    still connecting. If that rank then died at once, the others would report a failed start instead
    of a lost peer. Rank 0 leaves last if it serves the store.
    """
    others = rendezvous.world - 1
    if store.add("distcheck/joined", 1) == rendezvous.world:
        store.set("distcheck/all joined", "")
    wait_for(store, ["distcheck/all joined"])
    if _is_file(store):
        return
    if rendezvous.rank == 0:
        store.wait(["distcheck/all know"] if others else [])
    elif store.add("distcheck/know", 1) == others:
        store.set("distcheck/all know", "")


def _is_number(host: str) -> bool:
    """Return True if a host is a numeric address, which needs no name lookup."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
