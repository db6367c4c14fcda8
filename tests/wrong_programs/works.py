"""Works that are never waited for, or waited for twice: the life cycle of requests."""

import torch
import torch.distributed as dist

from tests.wrong_programs import WORLD, wrong

_KIND = "request life cycle"
_CAUSE = "work-not-waited"


@wrong(_KIND, _CAUSE, on_gloo="")
def drops_the_work(rank: int, wrong: bool) -> None:
    """Starts a reduction, and keeps nothing to wait for."""
    work = dist.all_reduce(torch.ones(8), async_op=True)  # named
    if not wrong:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def waits_for_all_but_the_last(rank: int, wrong: bool) -> None:
    """Leaves out the last one of several works."""
    tensors = [torch.ones(8) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  # named
    for work in works[:-1] if wrong else works:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def waits_on_one_rank_only(rank: int, wrong: bool) -> None:
    """Only the root waits for its broadcast."""
    work = dist.broadcast(torch.ones(8), 0, async_op=True)  # named
    if rank == 0 or not wrong:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def drops_a_send(rank: int, wrong: bool) -> None:
    """Starts a send, and goes on."""
    if rank == 0:
        work = dist.isend(torch.ones(8), 1)  # named
        if not wrong:
            work.wait()
    elif rank == 1:
        dist.recv(torch.empty(8), 0)


@wrong(_KIND, _CAUSE, on_gloo="")
def drops_a_receive(rank: int, wrong: bool) -> None:
    """Starts a receive that no rank sends to, and goes on."""
    if rank == 0:
        work = dist.irecv(torch.empty(8), 1)  # named
        if not wrong:
            work.wait()
    elif rank == 1 and not wrong:
        dist.send(torch.ones(8), 0)


@wrong(_KIND, _CAUSE, on_gloo="")
def a_barrier_in_place_of_waiting(rank: int, wrong: bool) -> None:
    """Takes a barrier for the end of all that was started before."""
    work = dist.all_reduce(torch.ones(8), async_op=True)  # named
    dist.barrier()
    if not wrong:
        work.wait()


@wrong(_KIND, "tensor-used-in-flight", on_gloo="")
def drops_the_work_and_uses_the_result(rank: int, wrong: bool) -> None:
    """Reads a result whose work is gone."""
    tensor = torch.ones(8)
    work = dist.all_reduce(tensor, async_op=True)  # named
    if not wrong:
        work.wait()
    del work
    tensor.sum()  # named


@wrong(_KIND, "work-waited-twice", on_gloo="")
def waits_twice_for_a_send(rank: int, wrong: bool) -> None:
    """A second wait, which never ends on gloo."""
    if rank == 0:
        work = dist.isend(torch.ones(8), 1)  # named
        work.wait()
        if wrong:
            work.wait()  # named
    elif rank == 1:
        dist.recv(torch.empty(8), 0)


@wrong(_KIND, "work-waited-twice", on_gloo="")
def waits_twice_in_a_list(rank: int, wrong: bool) -> None:
    """A list of works that is waited for step by step, and not emptied."""
    works = []
    for _ in range(2):
        received = torch.empty(4)
        works = works if wrong else []
        works += dist.batch_isend_irecv(  # named
            [
                dist.P2POp(dist.isend, torch.ones(4), (rank + 1) % WORLD),
                dist.P2POp(dist.irecv, received, (rank - 1) % WORLD),
            ]
        )
        for work in works:
            work.wait()  # named
