"""An optimizer around the optimizer, which synchronises inside its step().

$ distcheck verify --strategy examples/forms/optimizer_wrapper.py:DistributedOptimizer --world 4
PASS

The step comes first, so the average comes too late to have been of any use:

$ distcheck verify --strategy examples/forms/optimizer_wrapper.py:StepsFirst --world 4
FAIL missing-sync
"""

import torch.distributed as dist


class DistributedOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def synchronize(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()

    def step(self):
        self.synchronize()
        self.optimizer.step()


class StepsFirst(DistributedOptimizer):
    def step(self):
        self.optimizer.step()
        self.synchronize()
