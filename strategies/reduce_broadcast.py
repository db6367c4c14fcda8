"""Rank 0 reduces every parameter's gradient, divides, and broadcasts the mean.

Two collectives where all_reduce is one: what it does in two halves. Only the root's result of a
reduce means anything, so only the root divides.
"""

import torch.distributed as dist
from torch import nn

from distcheck.contract import BackendReduce, Step, strategy


# gloo does not reduce sparse tensors; and a gradient is there on every rank, or on none.
@strategy(order=BackendReduce(), scale="divide-after", declines=("sparse", "absent_on_some"))
def reduce_broadcast(model: nn.Module, step: Step) -> None:
    """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen, or unused on every rank
            continue
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            gradient.mul_(step.weight)
        dist.reduce(gradient, dst=0, op=dist.ReduceOp.SUM, group=step.group)
        if step.rank == 0:
            gradient.div_(step.world_size)
        dist.broadcast(gradient, src=0, group=step.group)
