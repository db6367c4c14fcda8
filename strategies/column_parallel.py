"""A linear layer split by columns, by hand: each rank computes some of the outputs.

With y = x W, W cut into [W0 | W1 | ...] by its columns, rank r computes y_r = x W_r, and the parts
are put side by side. Backward turns that round: each rank takes its own part of the outputs'
gradient, and what it finds for the inputs is one rank's share of a sum over all of them.
(torch stores the transpose: `linear.weight` is [outputs, inputs], so its rows are cut.)
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distcheck.contract import strategy


class SumInBackward(torch.autograd.Function):
    """Forward: the same inputs on every rank. Backward: each rank's share is added up."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs."""
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' gradients."""
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class SideBySide(torch.autograd.Function):
    """Forward: the ranks' columns, one beside the other. Backward: this rank's own columns."""

    @staticmethod
    def forward(ctx: Any, columns: torch.Tensor) -> torch.Tensor:
        """All columns, on every rank."""
        parts = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, columns.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Those of the gradient's columns that this rank has computed."""
        return gradient.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


class ColumnParallelLinear(nn.Module):
    """This rank's columns of a linear layer; its outputs are the whole layer's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
        self.bias = None
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.detach().chunk(world)[rank].clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs], on every rank."""
        columns = F.linear(SumInBackward.apply(inputs), self.weight, self.bias)
        outputs: torch.Tensor = SideBySide.apply(columns)
        return outputs


@strategy(parallel={"tensor": -1}, workload="mlp")
class ColumnParallel:
    """Every linear layer whose outputs can be divided by the number of ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replaces the layers; other layers stay whole, on every rank."""
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear) and not layer.out_features % dist.get_world_size():
                    setattr(module, name, ColumnParallelLinear(layer))
        return model
