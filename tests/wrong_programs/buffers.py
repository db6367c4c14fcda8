"""Tensors that are used while a call is in flight: local concurrency."""

import copy
import io
import pickle

import torch
import torch.distributed as dist

from tests.wrong_programs import WORLD, wrong

_KIND = "local concurrency"
_CAUSE = "tensor-used-in-flight"
_AHEAD_OF = [(rank + 1) % WORLD for rank in range(WORLD)]


@wrong(_KIND, _CAUSE, on_gloo="")
def writes_before_it_waits(rank: int, wrong: bool) -> None:
    """Adds to a tensor that is being reduced."""
    tensor = torch.ones(64)
    work = dist.all_reduce(tensor, async_op=True)  # named
    if not wrong:
        work.wait()
    tensor.add_(1)  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def divides_before_it_waits(rank: int, wrong: bool) -> None:
    """The mean of gradients, taken before the sums are there."""
    model = torch.nn.Linear(3, 2)
    model(torch.ones(4, 3)).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(g, async_op=True) for g in gradients]  # named
    if not wrong:
        for work in works:
            work.wait()
    for gradient in gradients:
        gradient /= WORLD  # named
    for work in works:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def reads_before_it_waits(rank: int, wrong: bool) -> None:
    """Looks at the result of a broadcast that is not there."""
    tensor = torch.full((4,), float(rank))
    work = dist.broadcast(tensor, 0, async_op=True)  # named
    if not wrong or rank == 0:
        work.wait()
    tensor.sum().item()  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def reads_what_it_has_not_received(rank: int, wrong: bool) -> None:
    """Uses a message before it has come."""
    if rank == 0:
        dist.send(torch.ones(4), 1)
    elif rank == 1:
        received = torch.zeros(4)
        work = dist.irecv(received, 0)  # named
        if not wrong:
            work.wait()
        received * 2  # named
        if wrong:
            work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def reuses_the_buffer_of_a_send(rank: int, wrong: bool) -> None:
    """Overwrites a message before it is sent."""
    if rank == 0:
        buffer = torch.ones(4)
        work = dist.isend(buffer, 1)  # named
        if not wrong:
            work.wait()
        buffer.zero_()  # named
        if wrong:
            work.wait()
    elif rank == 1:
        dist.recv(torch.empty(4), 0)


@wrong(_KIND, _CAUSE, on_gloo="")
def one_buffer_for_all_messages(rank: int, wrong: bool) -> None:
    """Fills one buffer anew for each receiver, before the last message is sent."""
    if rank:
        dist.recv(torch.empty(4), 0)
        return
    buffer, works = torch.empty(4), []
    for other in range(1, WORLD):
        buffer = buffer if wrong else torch.empty(4)
        buffer.fill_(other)  # named
        works.append(dist.isend(buffer, other))  # named
    for work in works:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def two_receives_into_one_tensor(rank: int, wrong: bool) -> None:
    """Two messages are received into the same memory."""
    if rank in (1, 2):
        dist.send(torch.full((4,), float(rank)), 0)
    elif rank == 0:
        buffer = torch.empty(2, 4)
        places = (0, 0) if wrong else (0, 1)
        works = [dist.irecv(buffer[p], r) for p, r in zip(places, (1, 2), strict=True)]  # named
        for work in works:
            work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def exchanges_in_place(rank: int, wrong: bool) -> None:
    """Sends and receives the same tensor at once."""
    sent = torch.full((4,), float(rank))
    received = sent if wrong else torch.empty(4)
    works = dist.batch_isend_irecv(  # named
        [
            dist.P2POp(dist.isend, sent, _AHEAD_OF[rank]),
            dist.P2POp(dist.irecv, received, (rank - 1) % WORLD),
        ]
    )
    for work in works:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def reduces_twice_at_once(rank: int, wrong: bool) -> None:
    """Starts a second reduction of a tensor that is being reduced."""
    tensor = torch.ones(8)
    first = dist.all_reduce(tensor, async_op=True)  # named
    if not wrong:
        first.wait()
    second = dist.all_reduce(tensor, async_op=True)  # named
    first.wait()
    second.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def a_view_of_what_is_in_flight(rank: int, wrong: bool) -> None:
    """Writes one element of a bucket through a view that overlaps what is reduced."""
    bucket = torch.ones(16)
    work = dist.all_reduce(bucket[4:12], async_op=True)  # named
    bucket.view(4, 4)[0 if not wrong else 1, 2] = 5.0  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def steps_before_it_waits(rank: int, wrong: bool) -> None:
    """The optimizer takes gradients that are being reduced."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(4, 3)).sum().backward()
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]  # named
    if not wrong:
        for work in works:
            work.wait()
    optimizer.step()  # named
    for work in works:
        work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def zeroes_gathered_parts(rank: int, wrong: bool) -> None:
    """Clears what is being gathered into."""
    parts = [torch.empty(4) for _ in range(WORLD)]
    if not wrong:
        parts[3].zero_()
    work = dist.all_gather(parts, torch.ones(4), async_op=True)  # named
    if wrong:
        parts[3].zero_()  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def the_next_backward_adds_to_it(rank: int, wrong: bool) -> None:
    """A second backward adds to gradients that are being reduced."""
    layer = torch.nn.Linear(3, 2, bias=False)
    layer(torch.ones(4, 3)).sum().backward()
    work = dist.all_reduce(layer.weight.grad, async_op=True)  # named
    if not wrong:
        work.wait()
    layer(torch.ones(4, 3)).sum().backward()  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def lists_it_before_it_waits(rank: int, wrong: bool) -> None:
    """Reads a result by `tolist`, which torch dispatches nothing for."""
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)  # named
    if not wrong:
        work.wait()
    tensor.tolist()  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def prints_it_before_it_waits(rank: int, wrong: bool) -> None:
    """A line for debugging that shows what is not there yet."""
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)  # named
    if not wrong:
        work.wait()
    print(f"the sum is {tensor}")  # named
    work.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def pickles_it_before_it_waits(rank: int, wrong: bool) -> None:
    """The right twin pickles what is only read, and has a second name for the other's memory."""
    sent, received = torch.ones(3), torch.empty(3)
    work = dist.irecv(received, (rank - 1) % WORLD)  # named
    sending = dist.isend(sent, _AHEAD_OF[rank])
    copy.copy(received)
    pickle.dumps(received if wrong else sent)  # named
    work.wait()
    sending.wait()


@wrong(_KIND, _CAUSE, on_gloo="")
def saves_it_before_it_waits(rank: int, wrong: bool) -> None:
    """A checkpoint of weights that are being averaged."""
    model = torch.nn.Linear(3, 2)
    works = [dist.all_reduce(p.data, async_op=True) for p in model.parameters()]  # named
    if not wrong:
        for work in works:
            work.wait()
    torch.save(model.state_dict(), io.BytesIO())  # named
    for work in works:
        work.wait()
