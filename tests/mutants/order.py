"""Every number within its bound, and still not the bits that are owed."""

import os

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import BackendAllReduce, Step, strategy
from tests.mutants import mutant


def _gather(gradient: torch.Tensor, step: Step) -> list[torch.Tensor]:
    gathered = [torch.empty_like(gradient) for _ in range(step.world_size)]
    dist.all_gather(gathered, gradient)
    return gathered


@mutant(caught="gradients X")
@strategy(order=BackendAllReduce(), scale="divide-after")
def adds_in_rank_order(model: nn.Module, step: Step) -> None:
    """Promises the backend's order, adds in another."""
    for parameter in model.parameters():
        parameter.grad.copy_(sum(_gather(parameter.grad, step)) / step.world_size)


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
