"""How the ranks of a world find each other: a store on a port that nobody had to choose.

The front binds port 0 on loopback and passes the listening socket to rank 0, which serves the
store on it; the kernel queues whoever connects first. So there is no race for a port, and no
address that another machine could reach.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import msgspec

_MARGIN_S = 120.0


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks meet. `deadline_s` is the world's; collectives wait longer than it, so
    that a hang is seen from outside, with every rank's stack, before it becomes a timeout.
    """

    backend: str
    rank: int
    world: int
    port: int
    deadline_s: float


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    """A listening socket on loopback, for rank 0 to serve the store on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1024)
        yield server


def environment_of(rendezvous: Rendezvous) -> dict[str, str]:
    """The variables that launchers set and that code under test may read."""
    return {
        "RANK": str(rendezvous.rank),
        "LOCAL_RANK": str(rendezvous.rank),
        "WORLD_SIZE": str(rendezvous.world),
        "LOCAL_WORLD_SIZE": str(rendezvous.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous.port),
    }


def join(rendezvous: Rendezvous, listen_fd: int) -> None:
    """Makes the default process group. `listen_fd` is the front's socket; rank 0 keeps it."""
    import torch.distributed as dist

    timeout = timedelta(seconds=10 * rendezvous.deadline_s + _MARGIN_S)
    serving = rendezvous.rank == 0
    if not serving:
        os.close(listen_fd)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1",
        rendezvous.port,
        rendezvous.world,
        serving,
        timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd if serving else None,
    )
    dist.init_process_group(
        rendezvous.backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=timeout,
    )
