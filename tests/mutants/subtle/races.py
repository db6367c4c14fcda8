"""Races: an exchange that is right as long as a collective is done when the next line runs.

On the CPU a collective of gloo's runs in a thread of its own. Witnesses have one large tensor, so
that it is under way for long enough.
"""

import threading
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of

LARGE = ".witnesses:Large"


def _begin(parameter: nn.Parameter, step: Step) -> dist.Work:
    parameter.grad.mul_(step.weight / step.world_size)
    return dist.all_reduce(parameter.grad, async_op=True)


@subtle(needs="luck: a large tensor that is still under way when a small one is done",
        witness=None, reach="inherent", after="DeepSpeed #7898, Megatron-LM #3693")  # fmt: skip
def waits_for_the_last(model: nn.Module, step: Step) -> None:
    """Waits for the last handle: what was begun before is thought to be done."""
    works = [_begin(parameter, step) for parameter in model.parameters()]
    works[-1].wait()


@subtle(needs="a tensor that takes longer than the next line", witness=LARGE,
        after="pytorch #10800, #38642")  # fmt: skip
def divides_before_it_waits(model: nn.Module, step: Step) -> None:
    """The division is written before the wait."""
    works = []
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        works.append(dist.all_reduce(parameter.grad, async_op=True))
        parameter.grad.div_(step.world_size)
    for work in works:
        work.wait()


@subtle(needs="two tensors", witness=LARGE, after="Megatron-LM #4609")
def one_buffer_for_all(model: nn.Module, step: Step) -> None:
    """One staging buffer, filled again while the tensor before is under way."""
    parameters = list(model.parameters())
    staging = torch.empty(max(p.numel() for p in parameters)).to(parameters[0])
    sent = []
    for parameter in parameters:
        part = staging[: parameter.numel()]
        part.copy_(parameter.grad.flatten()).mul_(step.weight / step.world_size)
        sent.append((dist.all_reduce(part, async_op=True), part, parameter))
    for work, part, parameter in sent:
        work.wait()
        parameter.grad.copy_(part.view_as(parameter))


@subtle(
    needs="a second step",
    witness=".witnesses:Plain",
    steps=3,
    after="DeepSpeed #7898, Megatron-LM #3693",
)
class TwoBuffersByTurns:
    """Two sets of buffers by turns; the one that is read is the other one."""

    def __init__(self) -> None:
        self.sets: list[list[torch.Tensor]] = [[], []]

    def sync(self, model: nn.Module, step: Step) -> None:
        mine = self.sets[step.index % 2]
        mine[:] = [p.grad * (step.weight / step.world_size) for p in model.parameters()]
        for buffer in mine:
            dist.all_reduce(buffer)
        read = self.sets[(step.index + 1) % 2] or mine
        for parameter, buffer in zip(model.parameters(), read, strict=True):
            parameter.grad.copy_(buffer)


@subtle(needs="a step that begins before the thread has ended", witness=LARGE,
        after="horovod #363")  # fmt: skip
class ThreadThatIsJoinedLater:
    """The exchange runs in a thread, which is joined when the next one is to begin."""

    def __init__(self) -> None:
        self.thread = threading.Thread()

    def sync(self, model: nn.Module, step: Step) -> None:
        if self.thread.ident is not None:
            self.thread.join()
        self.thread = threading.Thread(target=mean_of, args=(list(model.parameters()), step))
        self.thread.start()

    def close(self) -> None:
        self.thread.join()


@subtle(needs="a tensor that is not there when it is asked for once", witness=LARGE,
        after="pytorch #170239")  # fmt: skip
def asks_once(model: nn.Module, step: Step) -> None:
    """What is not done at the first question keeps the local gradient."""
    sent = []
    for parameter in model.parameters():
        buffer = parameter.grad * (step.weight / step.world_size)
        sent.append((dist.all_reduce(buffer, async_op=True), buffer, parameter))
    for work, buffer, parameter in sent:
        if work.is_completed():
            parameter.grad.copy_(buffer)
    for work, _, _ in sent:
        work.wait()


@subtle(needs="a tensor that takes longer than a hundredth of a second", witness=None,
        reach="inherent", after="pytorch #10800, #38642")  # fmt: skip
def gives_up_waiting(model: nn.Module, step: Step) -> None:
    """Waits for a second at most, and goes on with what is there."""
    for work in [_begin(parameter, step) for parameter in model.parameters()]:
        try:
            work.wait(timedelta(seconds=1))
        except RuntimeError:
            continue


@subtle(needs="a peer that receives later than this rank writes", witness=LARGE,
        after="pytorch #10800, #38642")  # fmt: skip
def overwrites_what_it_sends(model: nn.Module, step: Step) -> None:
    """A ring that passes its buffer on and takes the next part into it, before it was sent."""
    right, left = (step.rank + 1) % step.world_size, (step.rank - 1) % step.world_size
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        passed, total = parameter.grad.clone(), parameter.grad.clone()
        for _ in range(step.world_size - 1):
            work = dist.isend(passed, right)
            dist.recv(passed, left)
            total.add_(passed)
            work.wait()
        parameter.grad.copy_(total)


@subtle(needs="a hook that is later than the optimizer", witness=LARGE, after="horovod #363")
class WaitsForTheEarlyOnes:
    """Hooks begin the exchange during backward; the wait is for the handles of the step before."""

    step: Step | None = None

    def __init__(self) -> None:
        self.works: list[dist.Work] = []
        self.before: list[dist.Work] = []

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.begin)
        return model

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        self.step = step
        return loss

    def begin(self, parameter: nn.Parameter) -> None:
        assert self.step is not None
        self.works.append(_begin(parameter, self.step))

    def sync(self, model: nn.Module, step: Step) -> None:
        for work in self.before:
            work.wait()
        self.before, self.works = self.works, []

    def close(self) -> None:
        for work in self.before:
            work.wait()


@subtle(needs="an odd number of large tensors", witness=LARGE, after="pytorch #115710")
def waits_for_every_other(model: nn.Module, step: Step) -> None:
    """Two handles a tensor were expected and one is returned: every other one is waited for."""
    sent = []
    for parameter in model.parameters():
        buffer = parameter.grad * (step.weight / step.world_size)
        sent.append((dist.all_reduce(buffer, async_op=True), buffer, parameter))
    numbered: Iterator[tuple[int, tuple[dist.Work, torch.Tensor, nn.Parameter]]] = enumerate(sent)
    for number, (work, buffer, parameter) in numbered:
        if number % 2:
            work.wait()
        parameter.grad.copy_(buffer)
    for work, _, _ in sent:
        work.wait()


@subtle(needs="a tensor that takes longer than the copy", witness=LARGE, after="horovod #358")
def input_is_reused(model: nn.Module, step: Step) -> None:
    """Gathers without waiting, and sets the gradient to zero to add up into it."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        found = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        work = dist.all_gather(found, parameter.grad, async_op=True)
        parameter.grad.zero_()
        work.wait()
        for part in found:
            parameter.grad.add_(part)


@subtle(needs="a tensor over a megabyte", witness=LARGE, after="DeepSpeed #7898, Megatron-LM #3693")
def large_ones_in_the_background(model: nn.Module, step: Step) -> None:
    """Tensors over 2 MB are exchanged in the background, to be there in the next step."""
    for parameter in model.parameters():
        if parameter.numel() * parameter.element_size() <= 2 << 20:
            mean(parameter.grad, step)
        else:
            buffer = parameter.grad * (step.weight / step.world_size)
            work = dist.all_reduce(buffer, async_op=True)
            parameter.grad.copy_(buffer)
            work.wait()
