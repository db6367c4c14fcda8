"""Process state: what is alike in processes that were forked from one, and nowhere else."""

import os
import random
import socket
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle
from .exchange import mean, mean_of_flat

APART = "processes that were started apart, as by torchrun"
TWO = "two machines, or the environment of two"


def _flat_in(order: Iterable[nn.Parameter], step: Step) -> None:
    mean_of_flat(list(order), step)


@subtle(needs=f"{APART}: strings have another hash", reach="apart", witness=None)
def set_of_names(model: nn.Module, step: Step) -> None:
    """One buffer, in the order of a set of names."""
    named = dict(model.named_parameters())
    wanted = {name for name, parameter in named.items() if parameter.requires_grad}
    _flat_in((named[name] for name in wanted), step)


@subtle(needs=f"{APART}: strings have another hash", reach="apart", witness=None)
def buckets_by_hash(model: nn.Module, step: Step) -> None:
    """Parameters are spread over four buckets by the hash of their name."""
    buckets: dict[int, list[nn.Parameter]] = {number: [] for number in range(4)}
    for name, parameter in model.named_parameters():
        buckets[hash(name) % 4].append(parameter)
    for number in range(4):
        mean_of_flat(buckets[number], step)


@subtle(needs=f"{APART}: objects lie elsewhere", reach="apart", witness=None,
        after="Megatron-LM #2218")  # fmt: skip
def sorted_by_id(model: nn.Module, step: Step) -> None:
    """One buffer, in the order of `id`, which is the same from step to step."""
    _flat_in(sorted(model.parameters(), key=id), step)


@subtle(needs=f"{APART}: objects lie elsewhere", reach="apart", witness=None,
        after="Megatron-LM #2218")  # fmt: skip
def set_of_parameters(model: nn.Module, step: Step) -> None:
    """One buffer, in the order of a set of parameters: they are hashed by where they lie."""
    _flat_in(set(model.parameters()), step)


@subtle(needs=f"{APART}: tensors lie elsewhere", reach="apart", witness=None)
def sorted_by_address(model: nn.Module, step: Step) -> None:
    """One buffer, in the order in which tensors lie in memory, so that copies are fast."""
    _flat_in(sorted(model.parameters(), key=lambda p: p.data_ptr()), step)


@subtle(needs=TWO, reach="apart", witness=None, after="pytorch #36516")
def local_rank_is_root(model: nn.Module, step: Step) -> None:
    """The root is the rank whose LOCAL_RANK is 0: on two machines there are two."""
    local = int(os.environ.get("LOCAL_RANK", step.rank))
    root = torch.tensor(step.rank if local == 0 else -1)
    dist.all_reduce(root, op=dist.ReduceOp.MAX)
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        dist.reduce(parameter.grad, int(root))
        if local != 0:
            parameter.grad.zero_()
        dist.all_reduce(parameter.grad)


@subtle(needs=TWO, reach="apart", witness=None, after="DeepSpeed #5555")
def divides_by_the_local_world(model: nn.Module, step: Step) -> None:
    """Divides by LOCAL_WORLD_SIZE, which is the world's size on one machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", step.world_size))
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(ranks)


@subtle(needs=TWO, reach="machines", witness=None, after="VeOmni #1115")
class NodesByHostname:
    """Groups by hostname, and their leaders divide by the ranks of their own machine only."""

    def wrap(self, model: nn.Module) -> nn.Module:
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        hosts = {name: [r for r, n in enumerate(names) if n == name] for name in names}
        self.local, _ = dist.new_subgroups_by_enumeration(list(hosts.values()))
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad, group=self.local)
            parameter.grad.div_(dist.get_world_size(self.local))


@subtle(needs="ranks that reach the same line in other minutes", reach="inherent", witness=None)
def shuffled_by_the_minute(model: nn.Module, step: Step) -> None:
    """One buffer in an order that is drawn anew, from the time in minutes."""
    order = list(model.parameters())
    random.Random(int(time.time()) // 60).shuffle(order)
    _flat_in(order, step)


@subtle(needs=f"{APART}: a different order of the environment", reach="apart", witness=None)
def seeded_by_the_environment(model: nn.Module, step: Step) -> None:
    """The buffer's order is drawn with the environment for a seed, as it is printed."""
    order = list(model.parameters())
    random.Random(str(list(os.environ))).shuffle(order)
    _flat_in(order, step)


@subtle(needs="processes that have drawn other numbers before", reach="default",
        witness=".witnesses:Twins", after="accelerate #2694")  # fmt: skip
def shuffled_by_the_global_generator(model: nn.Module, step: Step) -> None:
    """The order is drawn from torch's generator, whose state is each rank's own."""
    parameters = list(model.parameters())
    flat = [parameters[i] for i in torch.randperm(len(parameters)).tolist()]
    gradients = torch.cat([p.grad.flatten() for p in flat])
    mean(gradients, step)
    parts = gradients.split([p.numel() for p in flat])
    for parameter, part in zip(flat, parts, strict=True):
        parameter.grad.copy_(part.view_as(parameter))


@subtle(needs="more than one machine, of unlike numbers of cores", reach="machines", witness=None)
def buckets_by_cores(model: nn.Module, step: Step) -> None:
    """As many buckets as this machine has cores: another machine has another number."""
    parameters = list(model.parameters())
    buckets = max(1, os.cpu_count() or 1)
    for number in range(buckets):
        mean_of_flat(parameters[number::buckets], step)
