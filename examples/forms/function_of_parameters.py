"""A function of the list of parameters, which works on every p.grad.

$ distcheck verify --strategy examples/forms/function_of_parameters.py:all_reduce_coalesced --world 4
PASS

Only what has two dimensions or more is averaged: the biases go their own ways.

$ distcheck verify --strategy examples/forms/function_of_parameters.py:weights_only --world 4
FAIL partial-sync
"""

import torch
import torch.distributed as dist


def all_reduce_coalesced(params):
    params = [p for p in params if p.grad is not None]
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, piece in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(piece.view_as(p))


def weights_only(params, world_size):
    for p in params:
        if p.dim() > 1:
            dist.all_reduce(p.grad)
            p.grad /= world_size
