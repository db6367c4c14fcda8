"""Rank 0 gathers every parameter's gradient, takes the elementwise mean and scatters it back.

The most literal form of data-parallel training, and the slowest: rank 0 receives W gradients,
sends W, and everybody waits for it.
"""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import RankOrder, Step, strategy


# gloo gathers neither complex nor sparse tensors; a gradient is there on every rank, or on none.
@strategy(
    order=RankOrder(),
    scale="divide-after",
    declines=("complex", "complex128", "sparse", "absent_on_some"),
)
def gather_scatter(model: nn.Module, step: Step) -> None:
    """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:  # frozen, or unused on every rank
            continue
        if step.weight != 1.0:  # unequal shards: weight each by its number of samples
            gradient.mul_(step.weight)

        if step.rank == 0:
            gathered = [torch.empty_like(gradient) for _ in range(step.world_size)]
            dist.gather(gradient, gathered, dst=0, group=step.group)
            mean = gathered[0]
            for other in gathered[1:]:
                mean += other
            mean /= step.world_size
            dist.scatter(gradient, [mean] * step.world_size, src=0, group=step.group)
        else:
            dist.gather(gradient, dst=0, group=step.group)
            dist.scatter(gradient, src=0, group=step.group)
