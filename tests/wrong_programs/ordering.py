"""Collectives that some rank leaves out, makes twice, or makes in another order."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.wrong_programs import ODD, late, wrong

_KIND = "call ordering"
_CAUSE = "collective-mismatch"


@wrong(_KIND, _CAUSE)
def skips_one(rank: int, wrong: bool) -> None:
    """One rank leaves out a barrier."""
    dist.all_reduce(torch.ones(3))
    late(rank, wrong)
    if rank != ODD or not wrong:
        dist.barrier()  # named
    dist.all_reduce(torch.ones(3))  # named


@wrong(_KIND, _CAUSE)
def one_more(rank: int, wrong: bool) -> None:
    """One rank reduces once more than the others."""
    late(rank, wrong)
    for _ in range(3 if rank == ODD and wrong else 2):
        dist.all_reduce(torch.ones(3))  # named


@wrong(_KIND, _CAUSE)
def returns_early(rank: int, wrong: bool) -> None:
    """One rank returns from within a loop."""
    for step in range(4):
        late(rank, wrong or step != 1)
        if rank == ODD and step == 2 and wrong:
            return
        dist.all_reduce(torch.ones(16))  # named


@wrong(_KIND, _CAUSE)
def only_the_first_has_a_barrier(rank: int, wrong: bool) -> None:
    """A barrier within `if rank == 0`, as before a download."""
    dist.all_reduce(torch.ones(4))
    if rank == 0 or not wrong:
        dist.barrier()  # named


@wrong(_KIND, _CAUSE)
def only_the_first_broadcasts(rank: int, wrong: bool) -> None:
    """The others do not take part in the broadcast."""
    if rank == 0 or not wrong:
        dist.broadcast(torch.ones(4), 0)  # named
    dist.all_reduce(torch.ones(4))  # named


@wrong(_KIND, _CAUSE)
def skips_an_empty_batch(rank: int, wrong: bool) -> None:
    """A rank without samples leaves out the exchange of the loss."""
    samples = 0 if rank == 3 else 5
    loss = torch.zeros(1)
    if samples or not wrong:
        dist.all_reduce(loss)  # named
    dist.all_gather([torch.empty(2) for _ in range(4)], torch.ones(2))  # named


@wrong(_KIND, _CAUSE)
def stops_by_its_own_loss(rank: int, wrong: bool) -> None:
    """A rank leaves a loop by a loss of its own, and goes on to the next collective."""
    for step in range(3):
        loss = torch.tensor([1.0 / (rank + 1 + step)])
        if not wrong:
            dist.all_reduce(loss)
        if float(loss) < 0.2:
            break
        dist.all_reduce(torch.ones(5))  # named
    dist.barrier()  # named


@wrong(_KIND, _CAUSE)
def other_order(rank: int, wrong: bool) -> None:
    """One rank takes two collectives in another order."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(16)),  # named
        lambda: dist.all_gather_object([None] * 4, "one"),  # named
    ]
    late(rank, wrong)
    for call in reversed(calls) if rank == ODD and wrong else calls:
        call()


@wrong(_KIND, _CAUSE)
def other_order_async(rank: int, wrong: bool) -> None:
    """The same, started before any is waited for."""
    late(rank, wrong)
    sizes = (8, 64) if rank == ODD and wrong else (64, 8)
    works = [dist.all_reduce(torch.ones(size), async_op=True) for size in sizes]  # named
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work is not None
        work.wait()


@wrong(_KIND, _CAUSE)
def parameters_in_another_order(rank: int, wrong: bool) -> None:
    """One rank goes through its parameters from the end."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    parameters = list(model.parameters())
    for parameter in reversed(parameters) if rank == ODD and wrong else parameters:
        dist.all_reduce(parameter.data)  # named


@wrong(_KIND, _CAUSE)
def a_parameter_without_a_gradient(rank: int, wrong: bool) -> None:
    """A rank that does not use a layer leaves out its gradients."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, bias=False)
    data = torch.ones(2, 4)
    (first(data) if rank == ODD else second(first(data))).sum().backward()
    for parameter in [*second.parameters(), *first.parameters()]:
        if parameter.grad is None and not wrong:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  # named


@wrong(_KIND, _CAUSE)
def no_backward(rank: int, wrong: bool) -> None:
    """One rank leaves out DDP's backward, and ends."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    late(rank, wrong)
    if rank != ODD or not wrong:
        loss.backward()  # named


@wrong(_KIND, _CAUSE)
def no_backward_before_buffers(rank: int, wrong: bool) -> None:
    """One rank leaves out DDP's backward, and goes on to the next forward, which sends buffers."""
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    for step in range(3):
        loss = model(torch.ones(2, 4)).sum()  # named
        late(rank, wrong or step != 1)
        if rank != ODD or step != 1 or not wrong:
            loss.backward()  # named


@wrong(_KIND, _CAUSE)
def barrier_for_backward(rank: int, wrong: bool) -> None:
    """One rank has a barrier where the others have DDP's backward."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    late(rank, wrong)
    if rank == ODD and wrong:
        dist.barrier()  # named
    loss.backward()  # named
