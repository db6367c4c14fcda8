"""Code that never divides, because its training loop has: the loss contract says so.

The loss was divided by the number of ranks before backward:

$ distcheck verify --strategy examples/forms/loss_contracts.py:all_reduce_gradients --loss mean/world --world 4
PASS

Or it is the sum over the shard, divided by the samples of all ranks, which is right for unequal
shards as well (256 samples over 3 ranks are 86, 85 and 85):

$ distcheck verify --strategy examples/forms/loss_contracts.py:all_reduce_gradients --loss sum/global --world 3
PASS

Under the usual contract, the mean over each rank's shard, the same code is wrong:

$ distcheck verify --strategy examples/forms/loss_contracts.py:all_reduce_gradients --world 4
FAIL missing-division

And code that divides is wrong under this one:

$ distcheck verify --strategy examples/forms/loss_contracts.py:average_gradients --loss mean/world --world 4
FAIL double-division
"""

import torch.distributed as dist


def all_reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
