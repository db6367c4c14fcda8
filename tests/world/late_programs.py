"""Correct programs of four ranks that look as if they hang, because one rank is late by a second.

Programs that hang, each with its correct twin, are in `tests/wrong_programs/`.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from distcheck.worlds.jobs import STORE, Descriptors, Reporter
from distcheck.worlds.rendezvous import join
from tests.world.jobs import Asked

LATE_S = 1.0  # longer than it takes to prove a hang
ODD = 2


def works_in_a_thread(rank: int) -> None:
    def exchange() -> None:
        if rank == ODD:
            time.sleep(LATE_S)
        dist.send(torch.ones(8), (rank + 1) % 4)

    thread = threading.Thread(target=exchange)
    thread.start()
    dist.recv(torch.empty(8), (rank - 1) % 4)
    thread.join()


def computes(rank: int) -> None:
    end = time.monotonic() + LATE_S
    while rank == ODD and time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)
    dist.barrier()


def computes_in_one_call(rank: int) -> None:
    begun = time.monotonic()
    while rank == ODD and time.monotonic() - begun < LATE_S:
        sum(range(20_000_000))  # no other thread runs Python meanwhile
    dist.all_reduce(torch.ones(64))


def waits_late(rank: int) -> None:
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (64, 1 << 18, 3)]
    if rank == ODD:
        time.sleep(LATE_S)
    for work in reversed(works):
        assert work is not None
        work.wait()
    dist.barrier()


def late_in_a_group(rank: int) -> None:
    group = dist.new_group([ODD, 3])
    if rank >= ODD:
        work = dist.all_reduce(torch.ones(8), async_op=True)
        if rank == ODD:
            time.sleep(LATE_S)
        dist.barrier(group)
        assert work is not None
        work.wait()
    else:
        dist.all_reduce(torch.ones(8))
    dist.barrier()


def hook_sleeps(rank: int) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 3))
    data = torch.ones(2, 4, requires_grad=True)
    data.register_hook(lambda _: time.sleep(LATE_S) if rank == ODD else None)
    model(data).sum().backward()
    dist.barrier()


def coalesced(rank: int) -> None:
    dist.barrier()
    if rank == ODD:
        time.sleep(LATE_S)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(3))
    works.wait()
    peers = (rank + 1) % 4, (rank - 1) % 4
    sent, received = torch.ones(4), torch.empty(4)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peers[0]), dist.P2POp(dist.irecv, received, peers[1])]
    ):
        work.wait()
    if dist.get_backend() == "gloo":
        dist.monitored_barrier()
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(8))
    dist.barrier()


def from_any(rank: int) -> None:
    if rank == ODD:
        time.sleep(LATE_S)
    if rank:
        dist.send(torch.ones(4), 0)
    else:
        for _ in range(3):
            dist.recv(torch.empty(4))
    dist.all_to_all_single(torch.empty(4), torch.ones(4))


def counts_on_a_limit(rank: int) -> None:
    """A receive that is given up after a while, of a group with a timeout for that."""
    group = dist.new_group(timeout=timedelta(seconds=2 * LATE_S))
    if rank == ODD:
        try:
            dist.recv(torch.empty(4), 0, group)
        except RuntimeError:
            dist.barrier()
            return
        raise AssertionError("what was never sent has come")
    dist.barrier()


def counts_on_a_limit_of_a_call(rank: int) -> None:
    """The same, of one call, which the backend mpi does not know."""
    if rank == ODD and dist.get_backend() == "gloo":
        options = dist.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank, options.timeout = 0, timedelta(seconds=2 * LATE_S)
        try:
            dist.group.WORLD.broadcast([torch.empty(4)], options).wait()
        except RuntimeError:
            return
        raise AssertionError("what was never sent has come")


def sizes_that_may_differ(rank: int) -> None:
    dist.scatter(torch.empty(2), [torch.ones(2)] * 4 if rank == 0 else None, 0)
    dist.gather(torch.ones(2), [torch.empty(2)] * 4 if rank == 0 else None, 0)
    if rank == ODD:
        time.sleep(LATE_S)
    dist.all_gather_object([None] * 4, "x" * rank * 100)
    sent, received = [rank + 1] * 4, [1, 2, 3, 4]
    dist.all_to_all_single(torch.empty(10), torch.ones(4 * (rank + 1)), received, sent)


PROGRAMS: dict[str, Callable[[int], None]] = {
    program.__name__: program
    for program in (
        works_in_a_thread, computes, computes_in_one_call, waits_late, late_in_a_group,
        hook_sleeps, coalesced, from_any, sizes_that_may_differ, counts_on_a_limit,
        counts_on_a_limit_of_a_call,
    )
}  # fmt: skip


def runs(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """One of the programs above."""
    asked = msgspec.msgpack.decode(payload, type=Asked)
    join(asked.rendezvous, fds[STORE])
    reporter.progress(1, "sync")
    PROGRAMS[asked.about["program"]](asked.rendezvous.rank)
    return b""
