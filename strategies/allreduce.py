"""Sum every parameter's gradient over the ranks with all_reduce, then divide by their number.

One collective per parameter, after backward has finished. Simple and exact; DDP does the same
in buckets, while backward is still running.
"""

import torch.distributed as dist
from torch import nn

from distcheck.contract import BackendAllReduce, Step, strategy


# Ranks that lack a gradient call no collective for it, so all have to lack it.
@strategy(order=BackendAllReduce(), scale="divide-after", declines=("absent_on_some",))
def allreduce(model: nn.Module, step: Step) -> None:
    """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen, or unused on every rank
            continue
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            gradient.mul_(step.weight)
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=step.group)
        gradient.div_(step.world_size)
