"""By number: an exchange that is right for as many tensors as its author's model had."""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, mean_of_flat

DEEP, ODD = ".witnesses:Deep", ".witnesses:Odd"


@subtle(needs="more than 64 tensors", witness=DEEP, after="pytorch #57077")
def only_64_tensors(model: nn.Module, step: Step) -> None:
    """A fixed table of 64 slots: what comes after is left out."""
    mean_of(list(model.parameters())[:64], step)


@subtle(needs="more than 32 tensors, not a multiple of 16", witness=ODD)
def batches_of_16(model: nn.Module, step: Step) -> None:
    """Many tensors go in batches of 16, and the last batch, which is not full, nowhere."""
    parameters = list(model.parameters())
    if len(parameters) <= 32:
        mean_of(parameters, step)
        return
    for number in range(len(parameters) // 16):
        mean_of_flat(parameters[number * 16 : (number + 1) * 16], step)


@subtle(needs="40 tensors or more, not a multiple of the number of chunks", witness=ODD)
def chunks_of_equal_length(model: nn.Module, step: Step) -> None:
    """As many chunks as there are twenties, all of one length: the rest of the division is lost."""
    parameters = list(model.parameters())
    chunks = max(1, len(parameters) // 20)
    length = len(parameters) // chunks
    for number in range(chunks):
        mean_of_flat(parameters[number * length : (number + 1) * length], step)


@subtle(needs="an odd number of tensors", witness=ODD)
def two_by_two(model: nn.Module, step: Step) -> None:
    """Two tensors in one collective; of an odd number the last one has no partner."""
    ones = iter(model.parameters())
    for pair in zip(ones, ones, strict=False):
        mean_of_flat(pair, step)


@subtle(needs="more than 24 tensors", witness=ODD, after="horovod #363")
def pending_up_to_24(model: nn.Module, step: Step) -> None:
    """What is under way is kept in a ring of 24 places; what is pushed out is not copied back."""
    pending: deque[tuple[dist.Work, torch.Tensor, nn.Parameter]] = deque(maxlen=24)
    works = []
    for parameter in model.parameters():
        buffer = parameter.grad * step.weight
        work = dist.all_reduce(buffer, async_op=True)
        works.append(work)
        pending.append((work, buffer, parameter))
    while pending:
        work, buffer, parameter = pending.popleft()
        work.wait()
        parameter.grad.copy_(buffer / step.world_size)
    for work in works:
        work.wait()


@subtle(needs="more than 10 tensors, of one shape", witness=ODD)
def sorted_as_text(model: nn.Module, step: Step) -> None:
    """Tensors by number, sorted as text: "10" comes before "2" where they are unpacked."""
    table = {str(number): p for number, p in enumerate(model.parameters())}
    flat = torch.cat([table[str(number)].grad.flatten() for number in range(len(table))])
    mean(flat, step)
    at = 0
    for key in sorted(table):
        gradient = table[key].grad
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


@subtle(needs="more than 53 tensors", witness=DEEP)
def presence_in_one_number(model: nn.Module, step: Step) -> None:
    """Which gradients there are is a bit mask, sent as a float64: it holds 53 bits."""
    parameters = list(model.parameters())
    mask = sum(1 << i for i, p in enumerate(parameters) if p.grad is not None)
    common = torch.tensor(float(mask), dtype=torch.float64)
    dist.all_reduce(common, op=dist.ReduceOp.MAX)
    mean_of([p for i, p in enumerate(parameters) if int(common) >> i & 1], step)


@subtle(needs="more than 50 tensors", witness=DEEP, after="pytorch #170239")
def waits_for_the_oldest_when_full(model: nn.Module, step: Step) -> None:
    """No more than 50 under way: then it waits for the oldest, and forgets the others' results."""
    pending: list[tuple[dist.Work, torch.Tensor, nn.Parameter]] = []
    done = []
    for parameter in model.parameters():
        if len(pending) == 50:
            done.append(pending[0])
            pending.clear()
        buffer = parameter.grad * (step.weight / step.world_size)
        pending.append((dist.all_reduce(buffer, async_op=True), buffer, parameter))
    for work, buffer, parameter in [*done, *pending]:
        work.wait()
        parameter.grad.copy_(buffer)


@subtle(needs="more than 30 tensors", witness=ODD, after="DeepSpeed #8154")
def second_buffer_is_scaled_twice(model: nn.Module, step: Step) -> None:
    """After 30 tensors a second buffer begins, whose weight is applied when it is filled, too."""
    parameters = list(model.parameters())
    mean_of_flat(parameters[:30], step)
    for parameter in parameters[30:]:
        parameter.grad.div_(step.world_size)
    mean_of_flat(parameters[30:], step)


@subtle(needs="more than 16 tensors", witness=ODD)
def slots_modulo_16(model: nn.Module, step: Step) -> None:
    """A ring of 16 buffers, each used again before it was read."""
    slots: dict[int, torch.Tensor] = {}
    works = []
    for number, parameter in enumerate(model.parameters()):
        slots[number % 16] = parameter.grad * (step.weight / step.world_size)
        works.append(dist.all_reduce(slots[number % 16], async_op=True))
    for work in works:
        work.wait()
    for number, parameter in enumerate(model.parameters()):
        if slots[number % 16].shape == parameter.shape:
            parameter.grad.copy_(slots[number % 16])


@subtle(needs="more than 32 tensors", witness=ODD, after="DeepSpeed #3832")
class TableOf32:
    """A table of 32 entries that is filled once; entry 33 replaces the last."""

    def __init__(self) -> None:
        self.table: dict[int, nn.Parameter] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        for number, parameter in enumerate(model.parameters()):
            self.table[min(number, 31)] = parameter
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(self.table.values(), step)


@subtle(needs="more than 40 tensors", witness=ODD)
def halves_of_the_list(model: nn.Module, step: Step) -> None:
    """Long lists are halved until they are short; the middle of an odd list is in neither half."""

    def exchange(parameters: list[nn.Parameter]) -> None:
        if len(parameters) <= 20:
            mean_of_flat(parameters, step)
            return
        half = len(parameters) // 2
        exchange(parameters[:half])
        exchange(parameters[-half:])

    exchange(list(model.parameters()))
