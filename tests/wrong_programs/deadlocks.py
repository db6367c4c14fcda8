"""Messages and collectives that wait for each other, and messages without their other end."""

import torch
import torch.distributed as dist

from tests.wrong_programs import ODD, WORLD, late, wrong

_KIND = "deadlock"


@wrong(_KIND, "hang")
def receives_first(rank: int, wrong: bool) -> None:
    """All receive from the next one before they send; right: even ones send first."""
    late(rank, wrong)
    ahead, behind = (rank + 1) % WORLD, (rank - 1) % WORLD
    if wrong or rank % 2:
        dist.recv(torch.empty(8), behind)  # named
        dist.send(torch.ones(8), ahead)
    else:
        dist.send(torch.ones(8), ahead)
        dist.recv(torch.empty(8), behind)


@wrong(_KIND, "hang")
def two_receive_from_each_other(rank: int, wrong: bool) -> None:
    """A pair that receives first, while the others have ended."""
    if rank == 0:
        dist.recv(torch.empty(2), 1)  # named
        dist.send(torch.ones(2), 1)
    elif rank == 1 and wrong:
        dist.recv(torch.empty(2), 0)  # named
        dist.send(torch.ones(2), 0)
    elif rank == 1:
        dist.send(torch.ones(2), 0)
        dist.recv(torch.empty(2), 0)


@wrong(_KIND, "hang")
def barrier_before_the_answer(rank: int, wrong: bool) -> None:
    """One rank has a barrier before it sends what another one receives before the barrier."""
    if rank == 1:
        dist.recv(torch.empty(2), ODD)  # named
    if rank == ODD and not wrong:
        dist.send(torch.ones(2), 1)
    dist.barrier()  # named
    if rank == ODD and wrong:
        dist.send(torch.ones(2), 1)


@wrong(_KIND, "hang")
def other_group_order(rank: int, wrong: bool) -> None:
    """Two groups, which one rank takes in another order."""
    first, second = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    late(rank, wrong)
    order = [second, first] if rank == ODD and wrong else [first, second]
    for group in order:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(torch.ones(3), group=group)  # named


@wrong(_KIND, "hang")
def groups_in_a_circle(rank: int, wrong: bool) -> None:
    """Four groups of two neighbors, each rank its own first."""
    groups = [dist.new_group(sorted({r, (r + 1) % WORLD})) for r in range(WORLD)]
    own = [groups[rank], groups[(rank - 1) % WORLD]]
    for group in own if wrong or rank else reversed(own):
        dist.all_reduce(torch.ones(3), group=group)  # named


@wrong(_KIND, "hang")
def all_receive_from_any(rank: int, wrong: bool) -> None:
    """All receive from any rank before they send."""
    ahead = (rank + 1) % WORLD
    if wrong or rank:
        dist.recv(torch.empty(2))  # named
        dist.send(torch.ones(2), ahead)
    else:
        dist.send(torch.ones(2), ahead)
        dist.recv(torch.empty(2))


@wrong(_KIND, "unmatched-message")
def waits_for_a_send(rank: int, wrong: bool) -> None:
    """A receive that no rank sends to, with works that are posted and waited for later."""
    work = dist.irecv(torch.empty(8), ODD) if rank == 1 else None  # named
    late(rank, wrong)
    if rank == ODD and not wrong:
        dist.send(torch.ones(8), 1)
    dist.barrier()
    if work is not None:
        work.wait()


@wrong(_KIND, "unmatched-message", on_mpi="")
def nobody_receives(rank: int, wrong: bool) -> None:
    """A send that its receiver has no receive for."""
    if rank == ODD:
        dist.send(torch.ones(8), 1)  # named
    elif rank == 1 and not wrong:
        dist.recv(torch.empty(8), ODD)


@wrong(_KIND, "unmatched-message")
def sends_to_the_wrong_rank(rank: int, wrong: bool) -> None:
    """A send to another rank than the one that receives."""
    if rank == ODD:
        dist.send(torch.ones(8), 0 if wrong else 1)  # named
    elif rank == 1:
        dist.recv(torch.empty(8), ODD)


@wrong(_KIND, "unmatched-message")
def one_receive_too_many(rank: int, wrong: bool) -> None:
    """The first rank collects from one rank more than there is."""
    if rank:
        dist.send(torch.ones(4), 0)
    else:
        for _ in range(4 if wrong else 3):
            dist.recv(torch.empty(4))  # named
