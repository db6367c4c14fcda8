"""A function of the model and of what a script knows: rank, world size, group, arguments.

What has a usual name is filled in.

$ distcheck verify --strategy examples/forms/function_with_arguments.py:gather_and_scatter --world 4
PASS

$ distcheck verify --strategy examples/forms/function_with_arguments.py:sync_in_group --world 4
PASS

Anything else is said with --arg; @world_size is what would be filled in under that name.

$ distcheck verify --strategy examples/forms/function_with_arguments.py:scaled --arg parts=@world_size --world 4
PASS

$ distcheck verify --strategy examples/forms/function_with_arguments.py:scaled --arg parts=3 --world 4
FAIL wrong-divisor

$ distcheck verify --strategy examples/forms/function_with_arguments.py:scaled --world 4
refused: unknown parameters parts; pass --arg parts=VALUE

The list that is gathered into is one tensor, named four times: what comes last is all that is left.

$ distcheck verify --strategy examples/forms/function_with_arguments.py:gathers_into_one --world 4
FAIL single-rank-gradient
"""

import torch
import torch.distributed as dist


def gather_and_scatter(model, rank, world_size, args):
    for p in model.parameters():
        if rank == 0:
            found = [torch.zeros_like(p.grad) for _ in range(args.world_size)]
            dist.gather(p.grad, found, dst=0)
            mean = torch.stack(found).sum(0) / world_size
            dist.scatter(p.grad, [mean] * world_size, src=0)
        else:
            dist.gather(p.grad, dst=0)
            dist.scatter(p.grad, src=0)


def sync_in_group(net, size, group):
    for p in net.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= size


def scaled(model, parts):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= parts


def gathers_into_one(model, rank, num_workers):
    for p in model.parameters():
        if rank == 0:
            found = [torch.zeros_like(p.grad)] * num_workers
            dist.gather(p.grad, found, dst=0)
            mean = sum(found) / num_workers
            dist.scatter(p.grad, [mean] * num_workers, src=0)
        else:
            dist.gather(p.grad, dst=0)
            dist.scatter(p.grad, src=0)
