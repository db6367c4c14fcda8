"""A function that synchronises and then calls optimizer.step() itself.

$ distcheck verify --strategy examples/forms/steps_with_the_optimizer.py:sync_and_step --world 4
PASS

Clipping before the average instead of after it: each rank shortens its own gradient.

$ distcheck verify --strategy examples/forms/steps_with_the_optimizer.py:clips_too_early --world 4
FAIL clip-before-sync
"""

import torch
import torch.distributed as dist


def sync_and_step(model, optimizer):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    optimizer.step()


def clips_too_early(model, optimizer, max_norm=0.05):
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    sync_and_step(model, optimizer)
