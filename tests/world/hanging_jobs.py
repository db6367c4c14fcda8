"""Programs of four ranks that hang where `wrong`, and end where not, one rank late by a second."""

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


def _late(rank: int, wrong: bool) -> None:
    if rank == ODD and not wrong:
        time.sleep(LATE_S)


def other_operation(rank: int, wrong: bool) -> None:
    """One rank broadcasts."""
    _late(rank, wrong)
    if rank == ODD and wrong:
        dist.broadcast(torch.ones(64), ODD)
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(64))


def other_root(rank: int, wrong: bool) -> None:
    """One rank takes another one for the root."""
    _late(rank, wrong)
    dist.broadcast(torch.ones(64), 3 if rank == 0 and wrong else 0)
    dist.reduce(torch.ones(64), 3 if rank == 0 and wrong else 0)


def other_shape(rank: int, wrong: bool) -> None:
    """One rank gathers more."""
    _late(rank, wrong)
    size = 5 if rank == ODD and wrong else 4
    dist.all_gather([torch.ones(size) for _ in range(4)], torch.ones(size))


def other_dtype(rank: int, wrong: bool) -> None:
    """One rank reduces doubles."""
    _late(rank, wrong)
    dtype = torch.float64 if rank == ODD and wrong else torch.float32
    dist.all_reduce(torch.ones(64, dtype=dtype))


def skips_one(rank: int, wrong: bool) -> None:
    """One rank leaves out a barrier."""
    dist.all_reduce(torch.ones(3))
    _late(rank, wrong)
    if rank != ODD or not wrong:
        dist.barrier()
    dist.all_reduce(torch.ones(3))


def one_more(rank: int, wrong: bool) -> None:
    """One rank reduces once more than the others."""
    _late(rank, wrong)
    for _ in range(3 if rank == ODD and wrong else 2):
        dist.all_reduce(torch.ones(3))


def other_group_order(rank: int, wrong: bool) -> None:
    """Two groups, which one rank takes in another order."""
    first, second = dist.new_group([0, 1, 2]), dist.new_group([1, 2, 3])
    _late(rank, wrong)
    order = [second, first] if rank == ODD and wrong else [first, second]
    for group in order:
        if dist.get_rank(group) >= 0:
            dist.all_reduce(torch.ones(3), group=group)


def receives_first(rank: int, wrong: bool) -> None:
    """All receive from the next one before they send; right: even ones send first."""
    _late(rank, wrong)
    ahead, behind = (rank + 1) % 4, (rank - 1) % 4
    if wrong or rank % 2:
        dist.recv(torch.empty(8), behind)
        dist.send(torch.ones(8), ahead)
    else:
        dist.send(torch.ones(8), ahead)
        dist.recv(torch.empty(8), behind)


def sends_unreceived(rank: int, wrong: bool) -> None:
    """A send that is received with another tag."""
    _late(rank, wrong)
    if rank == ODD:
        dist.send(torch.ones(1 << 20), 1, tag=7)
    elif rank == 1:
        dist.recv(torch.empty(1 << 20), ODD, tag=8 if wrong else 7)


def waits_for_a_send(rank: int, wrong: bool) -> None:
    """A receive that no rank sends to, with works that are posted and waited for later."""
    work = dist.irecv(torch.empty(8), ODD) if rank == 1 else None
    _late(rank, wrong)
    if rank == ODD and not wrong:
        dist.send(torch.ones(8), 1)
    dist.barrier()
    if work is not None:
        work.wait()


def returns_early(rank: int, wrong: bool) -> None:
    """One rank returns from within a loop."""
    for step in range(4):
        _late(rank, wrong or step != 1)
        if rank == ODD and step == 2 and wrong:
            return
        dist.all_reduce(torch.ones(16))


def other_order(rank: int, wrong: bool) -> None:
    """One rank takes two collectives in another order."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(16)), lambda: dist.all_gather_object([None] * 4, "one"),
    ]  # fmt: skip
    _late(rank, wrong)
    for call in reversed(calls) if rank == ODD and wrong else calls:
        call()


def other_order_async(rank: int, wrong: bool) -> None:
    """The same, started before any is waited for."""
    _late(rank, wrong)
    sizes = (8, 64) if rank == ODD and wrong else (64, 8)
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in sizes]
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()


def no_backward(rank: int, wrong: bool) -> None:
    """One rank leaves out DDP's backward, and ends."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    _late(rank, wrong)
    if rank != ODD or not wrong:
        loss.backward()


def barrier_for_backward(rank: int, wrong: bool) -> None:
    """One rank has a barrier where the others have DDP's backward."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    _late(rank, wrong)
    if rank == ODD and wrong:
        dist.barrier()
    loss.backward()


def _works_in_a_thread(rank: int, wrong: bool) -> None:
    def exchange() -> None:
        if rank == ODD:
            time.sleep(LATE_S)
        dist.send(torch.ones(8), (rank + 1) % 4)

    thread = threading.Thread(target=exchange)
    thread.start()
    dist.recv(torch.empty(8), (rank - 1) % 4)
    thread.join()


def _computes(rank: int, wrong: bool) -> None:
    end = time.monotonic() + LATE_S
    while rank == ODD and time.monotonic() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)
    dist.barrier()


def _computes_in_one_call(rank: int, wrong: bool) -> None:
    begun = time.monotonic()
    while rank == ODD and time.monotonic() - begun < LATE_S:
        sum(range(20_000_000))  # no other thread runs Python meanwhile
    dist.all_reduce(torch.ones(64))


def _waits_late(rank: int, wrong: bool) -> None:
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in (64, 1 << 18, 3)]
    if rank == ODD:
        time.sleep(LATE_S)
    for work in reversed(works):
        assert work is not None
        work.wait()
    dist.barrier()


def _late_in_a_group(rank: int, wrong: bool) -> None:
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


def _hook_sleeps(rank: int, wrong: bool) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(4, 4)] * 3))
    data = torch.ones(2, 4, requires_grad=True)
    data.register_hook(lambda _: time.sleep(LATE_S) if rank == ODD else None)
    model(data).sum().backward()
    dist.barrier()


def _coalesced(rank: int, wrong: bool) -> None:
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


def _from_any(rank: int, wrong: bool) -> None:
    if rank == ODD:
        time.sleep(LATE_S)
    if rank:
        dist.send(torch.ones(4), 0)
    else:
        for _ in range(3):
            dist.recv(torch.empty(4))
    dist.all_to_all_single(torch.empty(4), torch.ones(4))


def _counts_on_a_limit(rank: int, wrong: bool) -> None:
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


def _counts_on_a_limit_of_a_call(rank: int, wrong: bool) -> None:
    """The same, of one call, which the backend mpi does not know."""
    if rank == ODD and dist.get_backend() == "gloo":
        options = dist.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank, options.timeout = 0, timedelta(seconds=2 * LATE_S)
        try:
            dist.group.WORLD.broadcast([torch.empty(4)], options).wait()
        except RuntimeError:
            return
        raise AssertionError("what was never sent has come")


def _sizes_that_may_differ(rank: int, wrong: bool) -> None:
    dist.scatter(torch.empty(2), [torch.ones(2)] * 4 if rank == 0 else None, 0)
    dist.gather(torch.ones(2), [torch.empty(2)] * 4 if rank == 0 else None, 0)
    if rank == ODD:
        time.sleep(LATE_S)
    dist.all_gather_object([None] * 4, "x" * rank * 100)
    sent, received = [rank + 1] * 4, [1, 2, 3, 4]
    dist.all_to_all_single(torch.empty(10), torch.ones(4 * (rank + 1)), received, sent)


WRONG: dict[str, Callable[[int, bool], None]] = {
    program.__name__: program
    for program in (
        other_operation, other_root, other_shape, other_dtype, skips_one, one_more,
        other_group_order, receives_first, sends_unreceived, waits_for_a_send, returns_early,
        other_order, other_order_async, no_backward, barrier_for_backward,
    )
}  # fmt: skip
RIGHT: dict[str, Callable[[int, bool], None]] = {
    program.__name__: program
    for program in (
        _works_in_a_thread, _computes, _computes_in_one_call, _waits_late, _late_in_a_group,
        _hook_sleeps, _coalesced, _from_any, _sizes_that_may_differ, _counts_on_a_limit,
        _counts_on_a_limit_of_a_call,
    )
}  # fmt: skip


def runs(payload: bytes, fds: Descriptors, reporter: Reporter) -> bytes:
    """One of the programs above."""
    asked = msgspec.msgpack.decode(payload, type=Asked)
    join(asked.rendezvous, fds[STORE])
    reporter.progress(1, "sync")
    {**WRONG, **RIGHT}[asked.about["program"]](asked.rendezvous.rank, asked.about["wrong"])
    return b""
