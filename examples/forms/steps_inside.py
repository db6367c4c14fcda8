"""Code that takes the step itself: plain SGD, written out, after the gradients are summed.

$ distcheck verify --strategy examples/forms/steps_inside.py:synchronous_sgd --world 4
PASS

A parameter server: rank 0 gathers, takes the step, and sends the new parameters to all.

$ distcheck verify --strategy examples/forms/steps_inside.py:served_from_rank_0 --world 4
PASS

The step uses the rank's own gradient; the average is taken and dropped:

$ distcheck verify --strategy examples/forms/steps_inside.py:averages_and_forgets --world 4
FAIL missing-sync

Momentum is not plain SGD, so its gradients cannot be read off its step:

$ distcheck verify --strategy examples/forms/steps_inside.py:with_momentum --world 4
refused: changes parameters even if every gradient is zero
"""

import torch
import torch.distributed as dist


def synchronous_sgd(model, lr=0.01):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.data -= lr * p.grad / dist.get_world_size()


def served_from_rank_0(model, rank, world_size, learning_rate):
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        if rank == 0:
            p.data.sub_(p.grad / world_size, alpha=learning_rate)
        dist.broadcast(p.data, src=0)


def averages_and_forgets(model, lr=0.01):
    for p in model.parameters():
        mean = p.grad.clone()
        dist.all_reduce(mean)
        mean = mean / dist.get_world_size()
        p.data -= lr * p.grad


VELOCITY = {}


def with_momentum(model, lr=0.01):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        velocity = VELOCITY.setdefault(p, torch.zeros_like(p))
        velocity.mul_(0.9).add_(p.grad)
        p.data -= lr * velocity
