"""Fully sharded data parallel, written by hand: each rank keeps a piece of every parameter.

$ distcheck verify --strategy examples/forms/fsdp_by_hand.py:ShardedParameters --world 4
PASS

Pieces are of one length, the last ones padded. Here the sum of them is never divided by the number
of ranks:

$ distcheck verify --strategy examples/forms/fsdp_by_hand.py:ScatteredSums --world 4
FAIL missing-division

Each rank takes `numel // world_size` elements, so the remainder belongs to no rank:

$ distcheck verify --strategy examples/forms/fsdp_by_hand.py:DropsRemainders --world 4
FAIL crash
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


class GatherParameter(torch.autograd.Function):
    """Forward gathers the pieces, backward averages the gradient and scatters it in pieces."""

    @staticmethod
    def forward(ctx, shard, shape, divisor):
        ctx.padded = shard.numel() * dist.get_world_size()
        ctx.divisor = divisor
        whole = shard.new_empty(ctx.padded)
        dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
        return whole[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, gradient):
        padded = gradient.new_zeros(ctx.padded)
        padded[: gradient.numel()] = gradient.flatten()
        pieces = list(padded.chunk(dist.get_world_size()))
        piece = torch.empty_like(pieces[0])
        dist.reduce_scatter(piece, pieces)
        return piece / ctx.divisor, None, None


class ShardedParameters(nn.Module):
    def __init__(self, module):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.names = [name for name, _ in module.named_parameters()]
        self.shapes = [p.shape for p in module.parameters()]
        self.shards = nn.ParameterList()
        for p in module.parameters():
            flat = p.detach().flatten()
            length = self.shard_length(flat.numel(), size)
            padded = flat.new_zeros(max(length * size, flat.numel()))
            padded[: flat.numel()] = flat
            self.shards.append(nn.Parameter(padded[rank * length : (rank + 1) * length].clone()))
        for p in module.parameters():
            p.data = p.data.new_empty(0)  # gathered where a forward pass needs them
        self.skeleton = [module]  # in a list, so that its parameters are not ours

    def shard_length(self, elements, size):
        return -(-elements // size)

    def divisor(self):
        return dist.get_world_size()

    def forward(self, x):
        whole = {
            name: GatherParameter.apply(shard, shape, self.divisor())
            for name, shard, shape in zip(self.names, self.shards, self.shapes)
        }
        return functional_call(self.skeleton[0], whole, (x,))


class ScatteredSums(ShardedParameters):
    def divisor(self):
        return 1


class DropsRemainders(ShardedParameters):
    def shard_length(self, elements, size):
        return elements // size
