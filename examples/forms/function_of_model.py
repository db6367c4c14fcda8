"""A function of the model, called after backward.

$ distcheck verify --strategy examples/forms/function_of_model.py:average_gradients --world 4
PASS

The commonest mistake of all: the sum is never divided.

$ distcheck verify --strategy examples/forms/function_of_model.py:sums_gradients --world 4
FAIL missing-division

The average is computed, and bound to a name that is not read again:

$ distcheck verify --strategy examples/forms/function_of_model.py:drops_the_average --world 4
FAIL missing-sync

A reduce to rank 0 that is not sent back:

$ distcheck verify --strategy examples/forms/function_of_model.py:reduces_to_rank_0 --world 4
FAIL single-rank-gradient
"""

import torch.distributed as dist


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def sums_gradients(model):
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)


def drops_the_average(model):
    for param in model.parameters():
        grad = param.grad.clone()
        dist.all_reduce(grad)
        grad = grad / dist.get_world_size()


def reduces_to_rank_0(model):
    for param in model.parameters():
        mine = param.grad.clone()
        dist.reduce(mine, dst=0)
        if dist.get_rank() == 0:
            param.grad.copy_(mine / dist.get_world_size())
