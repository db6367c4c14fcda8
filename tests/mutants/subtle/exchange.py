"""What the mutants share, and is right: the mean of a gradient over all samples."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step


def mean(gradient: torch.Tensor, step: Step) -> None:
    """Replaces `gradient` by its mean over all samples, in place."""
    gradient.mul_(step.weight)
    dist.all_reduce(gradient)
    gradient.div_(step.world_size)


def mean_of(parameters: Iterable[nn.Parameter], step: Step) -> None:
    """The same for every parameter that has a gradient."""
    for parameter in parameters:
        if parameter.grad is not None:
            mean(parameter.grad, step)


def mean_of_flat(parameters: Iterable[nn.Parameter], step: Step) -> None:
    """The same in one collective."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    mean(flat, step)
    unpack(flat, gradients)


def unpack(flat: torch.Tensor, gradients: list[torch.Tensor]) -> None:
    """Writes a flat buffer back into `gradients`, in their order."""
    parts = flat.split([g.numel() for g in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
