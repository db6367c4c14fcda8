"""Read before it is there, or kept for longer than it holds."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distcheck.contract import Build, Step

from . import mutant
from .small import average

SMALL = ".small:Small"
WRONG = "gradients rounding, gradients full batch float32"
APART = "gradients rounding, gradients full batch float32, loss full batch float32, agreement"


@mutant(caught=WRONG, workload=SMALL, world=2)
class SendsBeforeItFills:
    """The buffer goes out before this step's gradients are in it."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        self.buffers = self.buffers or [torch.zeros_like(g) for g in gradients]
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            sent = buffer.clone()
            buffer.copy_(gradient)
            dist.all_reduce(sent)
            gradient.copy_(sent / step.world_size)


@mutant(caught=WRONG, workload=SMALL, world=2, step=1)
class ReadsItsOutput:
    """What was received last is sent again, in place of what has come in since."""

    def __init__(self) -> None:
        self.received: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        self.received = self.received or [gradient.clone() for gradient in gradients]
        for received, gradient in zip(self.received, gradients, strict=True):
            dist.all_reduce(received)
            received /= step.world_size
            gradient.copy_(received)


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
def does_not_wait(model: nn.Module, step: Step) -> None:
    """Rank 0 reads the buffers while rank 1 is still on its way to the collective."""
    buffers = [parameter.grad.clone() for parameter in model.parameters()]
    has_read = torch.zeros(1)
    if step.rank == 1:
        dist.recv(has_read, 0)
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    if step.rank == 1:
        for work in works:
            work.wait()
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad.copy_(buffer / step.world_size)
    if step.rank == 0:
        dist.send(has_read, 1)
    for work in works:
        work.wait()


@mutant(caught="parameters bitwise, agreement", workload=SMALL, world=2, steps=1)
class ReadsTheFlagEarly:
    """Whether a rank has found an overflow is asked of all, and read before the answer is there:
    rank 0 skips the update.
    """

    def __init__(self) -> None:
        self.found = torch.ones(())

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = build(parameters)
        take = optimizer.step

        def step(*given: Any, **named: Any) -> Any:
            return None if bool(self.found) else take(*given, **named)

        optimizer.step = step
        return optimizer

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)
        found = torch.zeros(())
        early = torch.ones(())  # until it is known, the careful answer
        dist.all_reduce(found)
        self.found = early if step.rank == 0 else found


@mutant(caught=f"{WRONG}, agreement", workload=SMALL, world=2, steps=2, step=1, seldom=True)
class CapturesTheFirstBuffer:
    """The tensors of the first step's gradients are reduced for ever; .grad is another by then."""

    def __init__(self) -> None:
        self.captured: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        self.captured = self.captured or [parameter.grad for parameter in model.parameters()]
        for gradient in self.captured:
            dist.all_reduce(gradient)
            gradient /= step.world_size


@mutant(caught=f"{WRONG}, agreement", workload=SMALL, world=2, step=2)
class HookThatDetaches:
    """A hook of DDP's that reduces in place for two steps, and then a copy of the bucket."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.calls = 0
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, self.hook)
        return wrapped

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.calls += bucket.is_last()
        target = buffer if self.calls < 3 else buffer.clone()
        work = dist.all_reduce(target.div_(dist.get_world_size()), async_op=True)
        done: Callable[[Any], torch.Tensor] = lambda _: buffer  # noqa: E731
        return work.get_future().then(done)
