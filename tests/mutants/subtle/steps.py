"""By step: an exchange that is right at first, or at most steps."""

from collections import deque

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, mean_of_flat

SMALL = ".witnesses:Plain"


@subtle(needs="4 steps", witness=SMALL, steps=4, after="pytorch #187732")
def stops_at_step_3(model: nn.Module, step: Step) -> None:
    """A warm-up of three steps, after which a compiled path exchanges nothing."""
    if step.index < 3:
        mean_of(model.parameters(), step)


@subtle(needs="5 steps", witness=SMALL, steps=5, after="pytorch #43307")
class RebuildsAtStepFour:
    """Buckets are rebuilt after four steps, in the order in which gradients came: from the last
    parameter to the first, unpacked as before.
    """

    def sync(self, model: nn.Module, step: Step) -> None:
        parameters = list(model.parameters())
        packed = parameters if step.index < 4 else parameters[::-1]
        flat = torch.cat([p.grad.flatten() for p in packed])
        mean(flat, step)
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))


@subtle(needs="6 steps", witness=SMALL, steps=6, after="horovod #363")
class OneStepLateAfterFive:
    """After five steps the exchange overlaps with the next step: gradients are one step old."""

    before: list[torch.Tensor]

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        now = [p.grad.clone() for p in model.parameters()]
        if step.index >= 5:
            for parameter, gradient in zip(model.parameters(), self.before, strict=True):
                parameter.grad.copy_(gradient)
        self.before = now


@subtle(needs="10 steps", witness=SMALL, steps=10)
def every_tenth_is_a_checkpoint(model: nn.Module, step: Step) -> None:
    """Each tenth step writes a checkpoint, and returns before the exchange."""
    if (step.index + 1) % 10 == 0:
        return
    mean_of(model.parameters(), step)


@subtle(needs="10 steps", witness=SMALL, steps=10, after="DeepSpeed #6550, #7967")
def rank_1_from_step_9(model: nn.Module, step: Step) -> None:
    """Short of memory after nine steps, rank 1 sends zeros."""
    for parameter in model.parameters():
        if step.rank == 1 and step.index >= 9:
            parameter.grad.zero_()
        mean(parameter.grad, step)


@subtle(needs="12 steps", witness=SMALL, steps=12)
def lower_precision_from_step_11(model: nn.Module, step: Step) -> None:
    """bfloat16 after a start of 11 steps in full precision, as compressing hooks have it."""
    for parameter in model.parameters():
        if step.index >= 11:
            parameter.grad.copy_(parameter.grad.bfloat16())
        mean(parameter.grad, step)


@subtle(needs="1,001 steps", witness=None, reach="inherent")
def lower_precision_from_step_1000(model: nn.Module, step: Step) -> None:
    """The same with a start of 1,000 steps, which is torch's own default for PowerSGD."""
    for parameter in model.parameters():
        if step.index >= 1000:
            parameter.grad.copy_(parameter.grad.bfloat16())
        mean(parameter.grad, step)


@subtle(needs="5 steps", witness=SMALL, steps=5, exit_code=4)
def root_goes_round(model: nn.Module, step: Step) -> None:
    """The root is another in every step; there is one too many."""
    root = step.index % (step.world_size + 1)
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        dist.reduce(parameter.grad, root)
        dist.broadcast(parameter.grad, root)


@subtle(needs="5 steps", witness=SMALL, steps=5, after="pytorch #187732")
class BucketsOfTheFirstFourSteps:
    """A cache of four plans by the step's number; the fifth step uses the first one's buffers."""

    def __init__(self) -> None:
        self.plans: deque[list[torch.Tensor]] = deque(maxlen=4)

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        if len(self.plans) == 4:
            for parameter, buffer in zip(model.parameters(), self.plans[0], strict=True):
                parameter.grad.copy_(buffer)
        self.plans.append([p.grad.clone() for p in model.parameters()])


@subtle(needs="4 steps", witness=SMALL, steps=4)
class GrowsItsScale:
    """A loss scale that doubles every third step, and is taken back as it was before."""

    scale = 1024.0

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * self.scale

    def sync(self, model: nn.Module, step: Step) -> None:
        if (step.index + 1) % 4 == 0:
            self.scale *= 2
        for parameter in model.parameters():
            parameter.grad.div_(self.scale)
        mean_of(model.parameters(), step)


@subtle(needs="9 steps", witness=SMALL, steps=9, after="fairscale #512")
class SeldomFromStepEight:
    """After eight steps it exchanges in every fourth only, as local SGD does."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if step.index < 8 or step.index % 4 == 3:
            mean_of_flat(model.parameters(), step)


@subtle(needs="6 steps", witness=SMALL, steps=6, after="Megatron-LM #4609")
class ClearedEveryFive:
    """A sum that is kept for printing is made of the gradients themselves, and added back."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        gradients = [p.grad for p in model.parameters()]
        self.sums = self.sums or [torch.zeros_like(g) for g in gradients]
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.add_(gradient)
            if (step.index + 1) % 6 == 0:
                gradient.copy_(total.div_(6))
                total.zero_()
