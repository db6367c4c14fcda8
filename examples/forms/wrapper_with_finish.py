"""A module around the module, as DistributedDataParallel is, with a call before the step.

$ distcheck verify --strategy examples/forms/wrapper_with_finish.py:DDP --world 4
PASS

A wrapper that must know where a step begins has its method of a usual name called as well:

$ distcheck verify --strategy examples/forms/wrapper_with_finish.py:OverlappedDDP --world 4
PASS

Methods of other names are given:

$ distcheck verify --strategy examples/forms/wrapper_with_finish.py:OddlyNamed --finish flush_all --reset begin --world 4
PASS

Without them, the reset is never called, and the second step's gradients wait for the first's:

$ distcheck verify --strategy examples/forms/wrapper_with_finish.py:OddlyNamed --finish flush_all --world 4
FAIL missing-sync

The last bucket is sent when it is full, and it never is:

$ distcheck verify --strategy examples/forms/wrapper_with_finish.py:LosesTheLastBucket --world 4
FAIL partial-sync
"""

import torch.distributed as dist
from torch import nn


class DDP(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.data, src=0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class OverlappedDDP(nn.Module):
    def __init__(self, module: nn.Module, bucket_size_mb: float = 1.0):
        super().__init__()
        self.module = module
        self.handles = []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._begin)

    def _begin(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def forward(self, x):
        return self.module(x)

    def wait_all(self):
        for handle in self.handles:
            handle.wait()

    def reset(self):
        self.handles.clear()


class OddlyNamed(nn.Module):
    def __init__(self, module, world_size):
        super().__init__()
        self.module, self.size, self.flushed = module, world_size, False

    def forward(self, x):
        return self.module(x)

    def flush_all(self):
        if self.flushed:
            return
        for p in self.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.size)
        self.flushed = True

    def begin(self):
        self.flushed = False


class LosesTheLastBucket(nn.Module):
    def __init__(self, module, bucket_size=5):
        super().__init__()
        self.module, self.bucket_size, self.bucket = module, bucket_size, []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._add)

    def _add(self, p):
        self.bucket.append(p)
        if len(self.bucket) == self.bucket_size:
            self.flush()

    def flush(self):
        for p in self.bucket:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.bucket = []

    def forward(self, x):
        self.bucket = []
        return self.module(x)
