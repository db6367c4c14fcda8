"""How the ranks of a world find each other: at a store.

If all ranks are forked by one front, the store is a file in memory, which the front passes to them.
Ranks of several processes meet at a store of torch's on a port: the front binds port 0, on loopback
unless ranks are on other machines, and passes the listening socket to rank 0, which serves the
store on it. The kernel queues early connections, so there is no race for a port.
"""

import contextlib
import functools
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from distcheck import backends
from distcheck.backends.mpi.library import TORCH_NAME
from distcheck.worlds import call_recorder, flight, linux

_MARGIN_S = 120.0
_LOOK_EVERY_S = 0.0005


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks meet. `deadline_s` is the world's; collectives wait longer than it, so
    that a hang is seen from outside, with every rank's stack, before it becomes a timeout.
    """

    backend: str
    rank: int
    world: int
    host: str
    port: int
    deadline_s: float
    in_memory: bool = False  # whether the store is a file that every rank is given


@contextlib.contextmanager
def meeting_place(host: str, *, in_memory: bool) -> Iterator[tuple[str, int, int]]:
    """Yield an address of this machine, and a descriptor for the store of ranks that meet: of a
    file in memory (`in_memory`), or of a socket that listens there, on which rank 0 serves it.

    Only processes that are given the file can open it. A socket is open to every user of this
    machine, since torch's store has no authentication: it is for ranks of several processes.
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
    """The variables that launchers set and that code under test may read, as on `nodes` machines
    with as many ranks each.
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
    """What code asks for where there is no world: a process group, and a launcher's variables."""
    import torch.distributed as dist

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def join(rendezvous: Rendezvous, store_fd: int, *, registered: str = "") -> Any:
    """Makes the default process group. `store_fd` is the front's, see `meeting_place`.

    `registered` is torch's name for the backend, where that is registered already. Returns the
    store at which the ranks have met, a `torch.distributed.Store`.
    """
    import torch.distributed as dist

    timeout = timedelta(seconds=10 * rendezvous.deadline_s + _MARGIN_S)
    usual_limit_s = min(timeout, _torchs_timeout()).total_seconds()
    if backends.name_of(rendezvous.backend) == "simulated":
        return _join_simulated(rendezvous, timeout, usual_limit_s)
    call_recorder.install(usual_limit_s)
    store = _store(rendezvous, store_fd, timeout)
    registered = registered or backends.register(rendezvous.backend)
    if registered == TORCH_NAME:
        note_calls_of_mpi()
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
    """Wait until keys are in a store. A file is looked at more often than torch does, which sleeps
    10 ms in between.
    """
    while _is_file(store) and not store.check(keys):
        time.sleep(_LOOK_EVERY_S)
    store.wait(keys)


def _is_file(store: Any) -> bool:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return isinstance(getattr(store, "underlying_store", store), FileStore)  # of one with a prefix


@functools.cache
def note_calls_of_mpi() -> None:
    """Makes this process note its calls of the backend mpi from now on, and record them: torch does
    neither. Groups whose calls time out sooner than usual have a limit of their own, which the code
    may count on.
    """
    from distcheck.backends.mpi import calls
    from distcheck.backends.mpi.group import MPIGroup
    from distcheck.backends.mpi.work import MPIWork

    flight.record_further(flight.CallRecorder(calls.entries, calls.forget, _move_on))
    call_recorder.note_calls_of(MPIGroup)
    notes = call_recorder.HERE
    call_recorder.note_waits_of(MPIWork, limited=lambda work: work.timeout_s < notes.usual_limit_s)


def _move_on() -> None:
    """Lets MPI complete what it can. What it promises does not let two threads enter it at once."""
    from distcheck.backends.mpi.runtime import mpi
    from distcheck.backends.mpi.work import move_on

    in_main = threading.current_thread() is threading.main_thread()
    if in_main and mpi().Is_initialized() and not mpi().Is_finalized():
        move_on()


def _torchs_timeout() -> timedelta:
    """That of a group for which the code names none."""
    from torch.distributed.constants import default_pg_timeout

    return default_pg_timeout


def _join_simulated(rendezvous: Rendezvous, timeout: timedelta, usual_limit_s: float) -> Any:
    """Ranks of one process meet in its memory."""
    import torch.distributed as dist

    from distcheck.worlds.simulated.group import register
    from distcheck.worlds.simulated.store import SimulatedStore
    from distcheck.worlds.simulated.world import here

    here().usual_limit_s = usual_limit_s
    store = SimulatedStore(here())
    dist.init_process_group(
        register(),
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=timeout,
    )
    return store


def _see_all_join(store: Any, rendezvous: Rendezvous) -> None:
    """Waits until every rank has its group: gloo lets one go on while others are still connecting,
    to whom one that dies at once would be a failed start and no collective's lost peer. Rank 0
    leaves last if it serves the store.
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
    """Whether it is an address already, so that no name has to be looked up to reach it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
