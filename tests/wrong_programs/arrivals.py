"""Results that depend on who is ready first, though every receive names its sender."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tests.wrong_programs import WORLD, wrong

_KIND = "order of arrival"
_CAUSE = "depends-on-schedule"


def _store() -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def asks_once_whether_it_is_done(rank: int, wrong: bool) -> object:
    """A flag that is polled once stands for what has arrived."""
    if rank == 1:
        dist.send(torch.ones(1), 0)  # named
    if rank:
        dist.barrier()
        return None
    received = torch.zeros(1)
    work = dist.irecv(received, 1)  # named
    early = work.is_completed()
    work.wait()
    dist.barrier()
    return (early if wrong else True), float(received)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def takes_whichever_is_done(rank: int, wrong: bool) -> object:
    """Of several works the first that is done gives the answer."""
    if rank:
        dist.send(torch.tensor([float(rank)]), 0)  # named
        return None
    parts = [torch.zeros(1) for _ in range(WORLD - 1)]
    works = [dist.irecv(part, sender) for sender, part in enumerate(parts, 1)]  # named
    done: list[int] = []
    while len(done) < len(works):
        waiting = [place for place in range(len(works)) if place not in done]
        done += [place for place in waiting if works[place].is_completed()][:1]
    return float(parts[done[0] if wrong else 0])


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def gives_up_after_two_looks(rank: int, wrong: bool) -> object:
    """Goes on without a peer that is not there yet; right: looks for as long as it takes."""
    if rank == WORLD - 1:
        dist.send(torch.ones(1), 0)  # named
    if rank:
        return None
    received, total, looks = torch.zeros(1), 1.0, 0
    work = dist.irecv(received, WORLD - 1)  # named
    while not work.is_completed() and (looks < 2 or not wrong):
        looks += 1
    if looks < 2 or not wrong:
        total += float(received)
    work.wait()
    return total


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def draws_a_ticket(rank: int, wrong: bool) -> object:
    """A counter in the store hands out parts of the work; right: the rank says which is whose."""
    dist.barrier()  # named
    ticket = _store().add("tickets", 1) - 1 if wrong else rank
    part = torch.tensor([float(10**ticket)]) * (rank + 1)
    dist.all_reduce(part)  # named
    return float(part)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def appends_to_a_common_file(rank: int, wrong: bool) -> object:
    """Ranks write a line each, in the order in which they come to it."""
    file = Path(tempfile.gettempdir()) / f"distcheck-lines-{os.getpid()}"
    if rank == 0:
        file.write_text("")
    dist.barrier()  # named
    with file.open("a") as lines:
        lines.write(f"{rank}\n")
    dist.barrier()  # named
    read = file.read_text().split()
    dist.barrier()
    file.unlink(missing_ok=True)
    return read if wrong else sorted(read)


@wrong(_KIND, _CAUSE, on_gloo="", schedules=True)
def another_call_where_it_is_not_done(rank: int, wrong: bool) -> object:
    """A rank that is not done yet tells the others by another call than theirs."""
    received, done = torch.zeros(1), True
    if rank == 2:
        dist.send(torch.ones(1), 0)  # named
    if rank == 0:
        work = dist.irecv(received, 2)  # named
        done = work.is_completed()
        work.wait()
    if done or not wrong:
        dist.barrier()
    else:
        dist.all_reduce(torch.zeros(1))
    return float(received)
