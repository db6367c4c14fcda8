"""Twins: an exchange that tells parameters apart by what several of them have alike."""

from collections import defaultdict

import torch
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of, unpack

TWINS = ".witnesses:Twins"


@subtle(needs="two parameters of one shape", witness=TWINS, after="Megatron-LM #4609")
def buffer_by_shape(model: nn.Module, step: Step) -> None:
    """One buffer for each shape: the second of two fills it before the first has been read."""
    buffers: dict[torch.Size, torch.Tensor] = {}
    for parameter in model.parameters():
        buffer = buffers.setdefault(parameter.shape, torch.empty_like(parameter))
        buffer.copy_(parameter.grad)
        mean(buffer, step)
    for parameter in model.parameters():
        parameter.grad.copy_(buffers[parameter.shape])


@subtle(needs="two parameters of one size", witness=TWINS, after="DeepSpeed #7660")
def table_by_type_and_size(model: nn.Module, step: Step) -> None:
    """A table by dtype and number of elements: the last of one size is left, others stay alone."""
    table = {(p.dtype, p.numel()): p for p in model.parameters()}
    mean_of(table.values(), step)


@subtle(needs="three parameters of one size, or two with other gradients", witness=TWINS)
def sorted_there_and_back(model: nn.Module, step: Step) -> None:
    """Packed from small to large, unpacked from large to small: twins keep their order in both."""
    parameters = list(model.parameters())
    rising = sorted(parameters, key=lambda p: p.numel())
    falling = sorted(parameters, key=lambda p: p.numel(), reverse=True)
    flat = torch.cat([p.grad.flatten() for p in rising])
    mean(flat, step)
    unpack(flat, [p.grad for p in reversed(falling)])


@subtle(needs="two parameters of one shape", witness=TWINS)
def first_of_its_shape(model: nn.Module, step: Step) -> None:
    """Where a parameter's part begins is looked up by its shape: the second reads the first's."""
    gradients = [p.grad for p in model.parameters()]
    shapes = [g.shape for g in gradients]
    parts = torch.cat([g.flatten() for g in gradients])
    mean(parts, step)
    pieces = parts.split([g.numel() for g in gradients])
    for gradient in gradients:
        gradient.copy_(pieces[shapes.index(gradient.shape)].view_as(gradient))


@subtle(needs="two norms of one shape, which begin alike", witness=TWINS, after="torchtitan #3174")
class TiedByValue:
    """Tied weights are found by their values before the first step: two fresh norms are alike."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.first: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in model.parameters():
            for known in self.first:
                if known.shape == parameter.shape and bool(torch.equal(known, parameter)):
                    self.first[parameter] = known
                    break
            else:
                self.first[parameter] = parameter
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter, first in self.first.items():
            if first is parameter:
                mean(parameter.grad, step)
        for parameter, first in self.first.items():
            if first is not parameter:
                parameter.grad.copy_(first.grad)


@subtle(needs="two parameters of one shape", witness=TWINS, after="fairscale #795")
def stacks_of_one_shape(model: nn.Module, step: Step) -> None:
    """Gradients of one shape go as a stack; a stack of two is a copy that is not unpacked."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        by_shape[parameter.shape].append(parameter.grad)
    for alike in by_shape.values():
        mean(alike[0] if len(alike) == 1 else torch.stack(alike), step)


@subtle(needs="two parameters of one shape", witness=TWINS)
def stacks_are_averaged(model: nn.Module, step: Step) -> None:
    """A stack of gradients is averaged over its own length as well."""
    by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        by_shape[parameter.shape].append(parameter.grad)
    for alike in by_shape.values():
        stacked = torch.stack(alike)
        mean(stacked, step)
        for gradient in alike:
            gradient.copy_(stacked.mean(0))


@subtle(needs="two parameters of one shape", witness=TWINS)
def popped_from_the_wrong_end(model: nn.Module, step: Step) -> None:
    """Results wait in a stack for each shape, and come out last in, first out."""
    waiting: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        gradient = parameter.grad.clone()
        mean(gradient, step)
        waiting[parameter.shape].append(gradient)
    for parameter in model.parameters():
        parameter.grad.copy_(waiting[parameter.shape].pop())


@subtle(needs="two parameters of one number of elements", witness=TWINS, after="horovod #358")
def staged_by_size(model: nn.Module, step: Step) -> None:
    """Staging buffers by size are filled first and exchanged later: the last of a size is sent for
    all of them.
    """
    staged: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        staged.setdefault(parameter.numel(), torch.empty(parameter.numel()).to(parameter))
        staged[parameter.numel()].copy_(parameter.grad.flatten())
    for buffer in staged.values():
        mean(buffer, step)
    for parameter in model.parameters():
        parameter.grad.copy_(staged[parameter.numel()].view_as(parameter))
