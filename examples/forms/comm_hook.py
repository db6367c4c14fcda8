"""A communication hook for DistributedDataParallel: a function, or a method, with its state.

$ distcheck verify --strategy examples/forms/comm_hook.py:mean_hook --world 4
PASS

$ distcheck verify --strategy examples/forms/comm_hook.py:divided_by_state --arg state=@examples/forms/comm_hook.py:State --world 4
PASS

$ distcheck verify --strategy examples/forms/comm_hook.py:State.hook --world 4
PASS

DDP divides by the number of ranks only where there is no hook:

$ distcheck verify --strategy examples/forms/comm_hook.py:sum_hook --world 4
FAIL missing-division
"""

import torch
import torch.distributed as dist


def mean_hook(state, bucket):
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])


class State:
    def __init__(self, world_size):
        self.world_size = world_size

    def hook(self, bucket):
        return divided_by_state(self, bucket)


def divided_by_state(state, bucket):
    flat = bucket.buffer().div_(state.world_size)
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
