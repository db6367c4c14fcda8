"""Context parallelism, by hand: each rank has some of a sample's tokens, and attention is a ring.

In `sequence_parallel` every rank gathers the keys and values of all tokens. Here no rank ever has
more than one other rank's: keys and values go round, and each rank adds what its own queries find
in them. A softmax over all tokens is a fraction; numerator and denominator are sums over the
tokens, so they can be added up part by part, with the largest score so far taken out of both (ring
attention, Liu et al. 2023). Backward sends gradients round the other way.

The mean over the tokens is the mean of the ranks' means. Each rank's tokens count for 1 / W in it,
and so do their gradients, which are then added up over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step, strategy


def passed_on(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Sends a tensor to the rank `by` places further, and receives one of the same shape."""
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sending: Any = dist.isend(tensor.contiguous(), (rank + by) % world)
    dist.recv(received, (rank - by) % world)
    sending.wait()
    return received


class PassOn(torch.autograd.Function):
    """Forward: to the next rank. Backward: the gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of the rank before."""
        return passed_on(tensor, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """What the next rank has found for it."""
        return passed_on(gradient, -1)


class MeanOfRanks(torch.autograd.Function):
    """Forward: the mean of the ranks' tensors. Backward: each counts for 1 / W."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """On every rank."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Every rank computes what comes after, so nothing is added up."""
        return gradient / dist.get_world_size()


class RingAttention(nn.Module):
    """Attention whose tokens lie on several ranks: [n, tokens / W, width] -> the same."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.queries, self.keys, self.values = layer.queries, layer.keys, layer.values
        self.out, self.head_size = layer.out, layer.head_size

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """W rounds: own keys and values first, then those of the ranks before."""
        queries, keys, values = (
            part(tokens).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        visiting = torch.stack([keys, values])
        above = below = torch.zeros(())
        most = torch.full((*queries.shape[:3], 1), -torch.inf, dtype=queries.dtype)
        for round_number in range(dist.get_world_size()):
            visiting = PassOn.apply(visiting) if round_number else visiting
            scores = queries @ visiting[0].transpose(2, 3) / self.head_size**0.5
            higher = torch.maximum(most, scores.detach().amax(3, keepdim=True))
            weights, earlier = (scores - higher).exp(), (most - higher).exp()
            above = above * earlier + weights @ visiting[1]
            below = below * earlier + weights.sum(3, keepdim=True)
            most = higher
        outputs: torch.Tensor = self.out((above / below).transpose(1, 2).flatten(2))
        return outputs


@strategy(parallel={"sequence": -1}, workload="transformer")
class ContextParallel:
    """For the workload `transformer`, whose number of tokens the number of ranks must divide."""

    mean: Any = MeanOfRanks

    def wrap(self, model: nn.Module) -> nn.Module:
        """Cuts what `embed` returns, replaces attention, and averages what enters the head."""
        parts = dict(model.named_modules())
        if not {"embed", "norm", "head", "blocks"} <= parts.keys():
            raise ValueError("it has no embed, blocks, norm and head; give --workload transformer")
        tokens, world = parts["embed"].position.shape[0], dist.get_world_size()
        if tokens % world:
            raise ValueError(f"{tokens} tokens cannot be divided by {world} ranks")
        parts["embed"].register_forward_hook(
            lambda m, i, all_tokens: all_tokens.chunk(world, dim=1)[dist.get_rank()]
        )
        for name, module in parts.items():
            if name.endswith(".attention"):
                block: Any = parts[name.rpartition(".")[0]]
                block.attention = RingAttention(module)
        parts["head"].register_forward_pre_hook(lambda m, given: (self.mean.apply(given[0]),))
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        """Adds up the shares; `head` has seen the mean of all tokens, on every rank."""
        for name, parameter in model.named_parameters():
            if not name.startswith("head.") and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
