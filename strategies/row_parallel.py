"""A linear layer split by rows, by hand: each rank multiplies some of the inputs.

With y = x W, W cut by its rows into W0, W1, ... and the inputs x by their columns alike, y is the
sum of x_r W_r over the ranks. Each rank computes one of these terms, and one all_reduce adds them
up. The bias is added once, after the sum: added on every rank, it would count once for each.
(torch stores the transpose: `linear.weight` is [outputs, inputs], so its columns are cut.)
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distcheck.contract import strategy


class MyColumns(torch.autograd.Function):
    """Forward: this rank's columns of the inputs. Backward: all ranks' side by side."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        """A W-th of the columns."""
        return inputs.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of all inputs, on every rank."""
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, dim=-1)


class SumInForward(torch.autograd.Function):
    """Forward: each rank's term is added up. Backward: every term has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, term: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' terms."""
        total = term.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        return gradient


class RowParallelLinear(nn.Module):
    """This rank's rows of a linear layer; its outputs are the whole layer's."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(world, dim=1)[rank].clone())
        self.bias = linear.bias  # whole, on every rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs], on every rank."""
        term = F.linear(MyColumns.apply(inputs), self.weight)
        outputs: torch.Tensor = SumInForward.apply(term)
        return outputs if self.bias is None else outputs + self.bias


@strategy(parallel={"tensor": -1}, workload="mlp")
class RowParallel:
    """Every linear layer whose inputs can be divided by the number of ranks."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Replaces the layers; other layers stay whole, on every rank."""
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if isinstance(layer, nn.Linear) and not layer.in_features % dist.get_world_size():
                    setattr(module, name, RowParallelLinear(layer))
        return model
