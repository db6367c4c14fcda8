"""Memory layout, dtype and shape: gradients that are packed, sent and put back wrongly."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant
from .small import average

SMALL = ".small:Small"
WRONG = "gradients rounding, gradients full batch float32"


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2)
def puts_back_in_storage_order(model: nn.Module, step: Step) -> None:
    """Strides are dropped: elements are sent in one order and put back in another."""
    for parameter in model.parameters():
        strided = parameter.grad.t() if parameter.dim() > 1 else parameter.grad
        flat = strided.contiguous().view(-1)
        dist.all_reduce(flat)
        parameter.grad.copy_(flat.view_as(parameter.grad) / step.world_size)


@mutant(caught=f"{WRONG}, agreement", workload=".small:Images", world=2, steps=1)
def mixes_memory_formats(model: nn.Module, step: Step) -> None:
    """Rank 1 has its weights channels-last, and what is sent is memory as it lies there."""
    for parameter in model.parameters():
        last = parameter.dim() == 4 and step.rank == 1
        gradient = parameter.grad
        if last:
            gradient = gradient.to(memory_format=torch.channels_last)
        flat = gradient.as_strided((gradient.numel(),), (1,)).clone()
        dist.all_reduce(flat)
        flat /= step.world_size
        parameter.grad.copy_(flat.as_strided(gradient.shape, gradient.stride()))


@mutant(caught=WRONG, workload=".small:Complex", world=2, steps=2)
def imaginary_part_is_zero(model: nn.Module, step: Step) -> None:
    """Of a complex gradient only the real part arrives."""
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
        if name == "pairs":
            parameter.grad[..., 1] = 0


@mutant(
    caught="gradients rounding", workload=".small:LargeGradients", world=4, steps=1, dtype="float16"
)
def sums_before_it_divides(model: nn.Module, step: Step) -> None:
    """Four gradients that float16 holds, and a sum that it does not."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(
    caught="gradients rounding", workload=".small:OneElement", world=4, steps=2, dtype="float16"
)
def one_element_is_not_divided(model: nn.Module, step: Step) -> None:
    """Numbers are divided in pairs, and a single one has no partner."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        pairs = parameter.grad.view(-1)[: parameter.numel() // 2 * 2]
        pairs /= step.world_size


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2)
def padded_parts_overlap(model: nn.Module, step: Step) -> None:
    """Parts are written with their padding, and offsets are counted without it."""
    parts, at, buffer = [], 0, torch.zeros(1024)
    for parameter in model.parameters():
        padding = -parameter.numel() % 24
        buffer[at : at + parameter.numel()] = parameter.grad.reshape(-1)
        buffer[at + parameter.numel() : at + parameter.numel() + padding] = 0
        parts.append((parameter, at))
        at += parameter.numel() // 24 * 24
    dist.all_reduce(buffer)
    buffer /= step.world_size
    for parameter, start in parts:
        flat = buffer[start : start + parameter.numel()]
        parameter.grad.copy_(flat.view_as(parameter))


@mutant(caught=WRONG, workload=".small:WithEmpty", world=2, steps=1)
def empty_parameter_poisons_all(model: nn.Module, step: Step) -> None:
    """A mean size is taken of every parameter, one of which has no elements: 0 / 0."""
    average(model, step)
    sizes = torch.stack([p.grad.abs().sum() / p.numel() for p in model.parameters()])
    scale = torch.where(sizes.sum() > 1e6, 0.5, sizes.sum() / sizes.sum())
    for parameter in model.parameters():
        parameter.grad *= scale


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, seldom=True)
def conversion_dropped(model: nn.Module, step: Step) -> None:
    """`.to(float32)` returns another tensor, and the short one is summed."""
    for parameter in model.parameters():
        buffer = parameter.grad.to(torch.bfloat16)
        buffer.to(torch.float32)
        dist.all_reduce(buffer)
        parameter.grad.copy_(buffer / step.world_size)


@mutant(
    caught="gradients rounding", workload=".small:TwoPrecisions", world=2, steps=2, dtype="bfloat16"
)
def buckets_by_the_wrong_dtype(model: nn.Module, step: Step) -> None:
    """All go into one bucket, of the last parameter's dtype."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([g.reshape(-1).to(gradients[-1].dtype) for g in gradients])
    dist.all_reduce(flat)
    flat /= step.world_size
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


@mutant(caught=f"{WRONG}, agreement", workload=".small:Twins", world=3, steps=1)
def another_order_on_each_rank(model: nn.Module, step: Step) -> None:
    """Parameters are sent in the order of a set: two of one shape meet each other."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient in gradients:
        gradient *= step.weight
    order = list(range(len(gradients)))
    if step.rank == 1:
        order[2], order[4] = order[4], order[2]  # the weights of the two layers
    for index in order:
        dist.all_reduce(gradients[index])
        gradients[index] /= step.world_size
