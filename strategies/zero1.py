"""ZeRO stage 1: gradients are all-reduced, and the optimizer's state is sharded.

torch's ZeroRedundancyOptimizer gives every parameter to one rank, which alone keeps its state
(momentum, Adam's moments), updates it, and broadcasts the result.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from distcheck.contract import BackendAllReduce, Build, Step, strategy


@strategy(
    order=BackendAllReduce(),
    scale="divide-after",
    optimizer_state="sharded",
    # ZeroRedundancyOptimizer takes one dtype at a time; a gradient is there on every rank, or none.
    declines=("mixed_dtypes", "complex", "complex128", "absent_on_some"),
)
class Zero1:
    """Plain all-reduce, and an optimizer that holds a W-th of the state."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """`build` makes the groups of parameters, and each rank's own optimizer over its part."""
        groups = build(parameters).param_groups
        return ZeroRedundancyOptimizer(groups, optimizer_class=build)  # type: ignore[arg-type]

    def sync(self, model: nn.Module, step: Step) -> None:
        """Leaves the mean gradient over all samples of the step in every `parameter.grad`."""
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None:  # frozen, or unused on every rank
                continue
            if step.weight != 1.0:  # unequal shards: weight each by its number of samples
                gradient.mul_(step.weight)
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM, group=step.group)
            gradient.div_(step.world_size)
