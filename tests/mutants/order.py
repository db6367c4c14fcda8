"""Every number within its bound, and still not the bits that are required."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import (
    BackendAllReduce,
    BackendReduce,
    DDPBuckets,
    RingOrder,
    Step,
    strategy,
)

from . import mutant


def _gather(gradient: torch.Tensor, step: Step) -> list[torch.Tensor]:
    gathered = [torch.empty_like(gradient) for _ in range(step.world_size)]
    dist.all_gather(gathered, gradient)
    return gathered


@mutant(caught="gradients bitwise")
@strategy(order=BackendAllReduce(), scale="divide-after")
def adds_in_rank_order(model: nn.Module, step: Step) -> None:
    """Promises the backend's order, adds in another."""
    for parameter in model.parameters():
        parameter.grad.copy_(sum(_gather(parameter.grad, step)) / step.world_size)


@mutant(caught="gradients bitwise")
@strategy(order=RingOrder(), scale="divide-after")
def goes_round_the_other_way(model: nn.Module, step: Step) -> None:
    """Promises the ring's order, and lets every chunk travel against it."""
    world = step.world_size
    for parameter in model.parameters():
        parts = [g.view(-1).tensor_split(world) for g in _gather(parameter.grad, step)]
        chunks = [
            sum(parts[(chunk - k) % world][chunk] for k in range(world)) for chunk in range(world)
        ]
        parameter.grad.copy_(torch.cat(chunks).view_as(parameter.grad) / world)


@mutant(caught="gradients bitwise")
@strategy(order=BackendReduce(), scale="divide-after")
def gathers_where_it_promised_to_reduce(model: nn.Module, step: Step) -> None:
    """Promises the order of the backend's reduce, adds in rank order."""
    for parameter in model.parameters():
        parameter.grad.copy_(sum(_gather(parameter.grad, step)) / step.world_size)


@mutant(caught="gradients bitwise", workload="cnn")
@strategy(
    order=DDPBuckets(rebuilt_at=None), scale="multiply-before", weighting="loss",
    sync="during-backward", buffers="rank 0",
)  # fmt: skip
class RebuildsItsBuckets:
    """Promises buckets that are never rebuilt, and is DDP with its defaults."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


@mutant(caught="agreement")
def everybody_starts_with_itself(model: nn.Module, step: Step) -> None:
    """Each rank adds in an order of its own: replicas drift apart by the last bit."""
    for parameter in model.parameters():
        gathered = _gather(parameter.grad, step)
        own_first = gathered[step.rank :] + gathered[: step.rank]
        parameter.grad.copy_(sum(own_first) / step.world_size)


@mutant(caught="rerun")
def order_of_arrival(model: nn.Module, step: Step) -> None:
    """All ranks agree on an order for every parameter, and every run on others."""
    for parameter in model.parameters():
        drawn = [int.from_bytes(os.urandom(4), "little") for _ in range(step.world_size)]
        order = torch.tensor(drawn)
        dist.broadcast(order, src=0)
        gathered = _gather(parameter.grad, step)
        parameter.grad.copy_(sum(gathered[i] for i in order.argsort()) / step.world_size)
