"""Right where ranks share their process state, as forks of one process do, and wrong between
machines: an order, an address or a number that every rank has of its own.
"""

import os
import zlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant


def _average_flat(parameters: Iterable[nn.Parameter], step: Step) -> None:
    """One bucket of all gradients, in the order that is given."""
    listed = list(parameters)
    flat = torch.cat([p.grad.flatten() for p in listed])
    dist.all_reduce(flat)
    flat /= step.world_size
    parts = flat.split([p.numel() for p in listed])
    for parameter, part in zip(listed, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@mutant(caught="rerun", separate=True, processes=True)
def fills_a_bucket_in_the_order_of_a_set(model: nn.Module, step: Step) -> None:
    """A set of names has another order under every hash seed."""
    named = dict(model.named_parameters())
    wanted = {name for name, parameter in named.items() if parameter.requires_grad}
    _average_flat([named[name] for name in wanted], step)


@mutant(caught="rerun", separate=True, processes=True)
def fills_a_bucket_in_the_order_of_hashes(model: nn.Module, step: Step) -> None:
    """hash() of a text is another number under every hash seed."""
    named = dict(model.named_parameters())
    _average_flat([named[name] for name in sorted(named, key=lambda name: hash(name))], step)


@mutant(caught="outcome", separate=True, exit_code=4, seldom=True, processes=True)
def chooses_a_bucket_by_hash(model: nn.Module, step: Step) -> None:
    """Buckets of different sizes meet in one collective."""
    for number in (0, 1):
        own = [p for name, p in model.named_parameters() if hash(name) % 2 == number]
        if own:
            _average_flat(own, step)


@mutant(caught="rerun", separate=True, seldom=True, processes=True)
def shuffles_by_the_hash_of_a_class(model: nn.Module, step: Step) -> None:
    """hash() of a class is its address, which is nowhere the same."""
    listed = list(model.parameters())
    drawn = torch.Generator().manual_seed(hash(nn.Linear))
    flat = torch.cat([p.grad.flatten() for p in listed])
    order = torch.randperm(flat.numel(), generator=drawn)
    mixed = flat[order]
    dist.all_reduce(mixed)
    flat[order] = mixed / step.world_size
    parts = flat.split([p.numel() for p in listed])
    for parameter, part in zip(listed, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@mutant(caught="rerun", separate=True, seldom=True)
def starts_where_the_environment_says(model: nn.Module, step: Step) -> None:
    """Variables come in the order in which a process was given them."""
    listed = list(model.parameters())
    first = zlib.crc32(",".join(os.environ).encode()) % len(listed)
    _average_flat(listed[first:] + listed[:first], step)


@mutant(caught="rerun", separate=True)
def takes_the_local_rank_for_the_rank(model: nn.Module, step: Step) -> None:
    """Each rank gives the part of the mean with its number, and two have one number."""
    place = int(os.environ["LOCAL_RANK"])
    for parameter in model.parameters():
        flat = parameter.grad.flatten()
        dist.all_reduce(flat)
        own = torch.zeros_like(flat)
        part = own.tensor_split(step.world_size)[place]
        part.copy_(flat.tensor_split(step.world_size)[place] / step.world_size)
        dist.all_reduce(own)
        parameter.grad.copy_(own.view_as(parameter))


@mutant(caught="rerun", separate=True, seldom=True)
def divides_by_the_ranks_of_a_machine(model: nn.Module, step: Step) -> None:
    """LOCAL_WORLD_SIZE is the world's size on one machine alone."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", step.world_size))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
