"""Sends that only a buffer saves from a deadlock: buffering hazards."""

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, WORLD, wrong

_KIND = "buffering hazard"
_CAUSE = "needs-buffering"


@wrong(_KIND, _CAUSE, on_gloo="hang", schedules=True, on_mpi="")
def a_ring_of_sends(rank: int, wrong: bool) -> None:
    """All send to the next one before they receive."""
    ahead, behind = (rank + 1) % WORLD, (rank - 1) % WORLD
    if wrong or rank:
        dist.send(torch.ones(8), ahead)  # named
        dist.recv(torch.empty(8), behind)
    else:
        dist.recv(torch.empty(8), behind)
        dist.send(torch.ones(8), ahead)


@wrong(_KIND, _CAUSE, on_gloo="hang", schedules=True, on_mpi="")
def both_send_first(rank: int, wrong: bool) -> None:
    """Pairs that exchange by a send and a receive each."""
    other = rank ^ 1
    if wrong or rank < other:
        dist.send(torch.ones(8), other)  # named
        dist.recv(torch.empty(8), other)
    else:
        dist.recv(torch.empty(8), other)
        dist.send(torch.ones(8), other)


@wrong(_KIND, _CAUSE, on_gloo="collective-mismatch", schedules=True, on_mpi="")
def received_in_another_order(rank: int, wrong: bool) -> None:
    """Two messages with tags, which are received in another order than they are sent."""
    if rank == ODD:
        dist.send(torch.ones(8), 1, tag=1)  # named
        dist.send(torch.ones(8), 1, tag=2)
    elif rank == 1:
        for tag in (2, 1) if wrong else (1, 2):
            dist.recv(torch.empty(8), ODD, tag=tag)  # named


@wrong(_KIND, _CAUSE, on_gloo="hang", schedules=True, on_mpi="")
def a_barrier_before_the_receive(rank: int, wrong: bool) -> None:
    """A send before a barrier, whose receive comes after it."""
    if rank == ODD:
        dist.send(torch.ones(8), 1)  # named
    if rank == 1 and not wrong:
        dist.recv(torch.empty(8), ODD)
    dist.barrier()  # named
    if rank == 1 and wrong:
        dist.recv(torch.empty(8), ODD)


@wrong(_KIND, _CAUSE, on_gloo="hang", schedules=True, on_mpi="")
def all_send_to_all_first(rank: int, wrong: bool) -> None:
    """Everybody sends to everybody before it receives; right: it starts the receives first."""
    others = [other for other in range(WORLD) if other != rank]
    received = [torch.empty(4) for _ in others]
    works = []
    if not wrong:
        works = [dist.irecv(t, other) for t, other in zip(received, others, strict=True)]
    for other in others:
        dist.send(torch.ones(4), other)  # named
    for work in works:
        work.wait()
    if wrong:
        for tensor, other in zip(received, others, strict=True):
            dist.recv(tensor, other)
