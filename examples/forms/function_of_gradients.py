"""A function of the list of gradients: in place, or returning a list of new ones.

$ distcheck verify --strategy examples/forms/function_of_gradients.py:average_in_place --world 4
PASS

$ distcheck verify --strategy examples/forms/function_of_gradients.py:averaged --world 4
PASS

A slice that ends one too early:

$ distcheck verify --strategy examples/forms/function_of_gradients.py:forgets_the_last --world 4
FAIL partial-sync

All ranks get the list back in another order than it went in:

$ distcheck verify --strategy examples/forms/function_of_gradients.py:sorted_by_size --world 4
refused: expected None (in place), or a tensor of the same shape for each
"""

import torch.distributed as dist


def average_in_place(grads):
    for g in grads:
        dist.all_reduce(g)
        g /= dist.get_world_size()


def averaged(grads):
    result = []
    for g in grads:
        total = g.clone()
        dist.all_reduce(total)
        result.append(total / dist.get_world_size())
    return result


def forgets_the_last(grads):
    for i in range(len(grads) - 1):
        dist.all_reduce(grads[i])
        grads[i] /= dist.get_world_size()


def sorted_by_size(grads):
    return averaged(sorted(grads, key=lambda g: g.numel()))
