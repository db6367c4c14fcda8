"""Right at step 0, wrong later."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant


@mutant(caught="gradients rounding, gradients full batch float32", step=1)
class UsesTheLastStep:
    """The optimizer sees the gradients of the step before."""

    def __init__(self) -> None:
        self.before: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        now = []
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size
            now.append(parameter.grad.clone())
        if self.before:
            for parameter, gradient in zip(model.parameters(), self.before, strict=True):
                parameter.grad.copy_(gradient)
        self.before = now


@mutant(caught="gradients rounding, gradients full batch float32", step=1)
class BufferNeverZeroed:
    """A gradient buffer is reused and added to (Megatron-LM #4609)."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        parameters = list(model.parameters())
        if not self.buffers:
            self.buffers = [torch.zeros_like(p) for p in parameters]
        for parameter, buffer in zip(parameters, self.buffers, strict=True):
            buffer += parameter.grad
            dist.all_reduce(buffer)
            buffer /= step.world_size
            parameter.grad.copy_(buffer)


@mutant(caught="gradients rounding, gradients full batch float32, agreement", step=2)
def stops_after_two_steps(model: nn.Module, step: Step) -> None:
    """Reducing ends at iteration 2 (pytorch #187732, #43307): two steps are too few to see it."""
    if step.index < 2:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size
