"""Wrappers that clear gradients themselves, or begin anew before every batch."""

import torch
import torch.distributed as dist
from torch import nn


class FlatViews(nn.Module):
    """Every gradient is a view of one buffer, which is what is exchanged."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        found = list(module.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in found), dtype=found[0].dtype)
        for p, part in zip(found, self.flat.split([p.numel() for p in found]), strict=True):
            p.grad = part.view_as(p)

    def forward(self, x):
        return self.module(x)

    def zero_grad(self, set_to_none=False):
        self.flat.zero_()

    def finish_gradient_synchronization(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()


class FlatViewsBeside:
    def __init__(self, model):
        self.buffer = FlatViews(model)

    def zero_grad(self):
        self.buffer.zero_grad()

    def all_reduce(self):
        self.buffer.finish_gradient_synchronization()


class ForgetsToClear(FlatViews):
    def zero_grad(self, set_to_none=False):
        pass


class StartsWithTheBatch(nn.Module):
    """What it keeps for a step is made where a batch begins, the first as well."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._begin)

    def on_train_batch_start(self):
        self.handles = []

    def _begin(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def forward(self, x):
        return self.module(x)

    def finish_gradient_synchronization(self):
        for handle in self.handles:
            handle.wait()
