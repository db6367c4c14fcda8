"""Losses that gather: each sample is compared with those of all ranks.

A loss is given features, and labels where a parameter is called so, or two views of the samples. It
is trained over a table of features with one row a sample. What DDP would leave of the gradients is
compared with one process that has all samples: of the features, and of the loss's own weights.

$ distcheck verify --strategy examples/forms/losses.py:Contrastive --as loss --world 2
PASS

Features of other ranks without a gradient: what is left is divided by the number of ranks, or, where
each rank compares its own rows only, a part of it is missing:

$ distcheck verify --strategy examples/forms/losses.py:WithoutGradient --as loss --world 2
FAIL double-division

$ distcheck verify --strategy examples/forms/losses.py:own_rows --as loss --world 2
FAIL wrong-backward-communication

Nothing is gathered, so every rank trains another loss than one process:

$ distcheck verify --strategy examples/forms/losses.py:of_own_samples --as loss --arg temperature=0.5 --world 2
FAIL missing-sync
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


def gathered_without_gradient(rows):
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(-1.0))

    def gathered(self, rows):
        return Gather.apply(rows)

    def forward(self, one, two):
        alike = self.gathered(one) @ self.gathered(two).T * self.scale.exp()
        return F.cross_entropy(alike, torch.arange(len(alike)))


class WithoutGradient(Contrastive):
    def gathered(self, rows):
        return gathered_without_gradient(rows)


def own_rows(one, two):
    alike = one @ gathered_without_gradient(two).T / 4
    return F.cross_entropy(alike, torch.arange(len(one)) + dist.get_rank() * len(one))


def of_own_samples(one, two, temperature):
    return F.cross_entropy(one @ two.T * temperature, torch.arange(len(one)))
