"""An optimizer's class that synchronises at the beginning of its step().

$ distcheck verify --strategy examples/forms/own_optimizer.py:DistributedSGD --world 4
PASS

With an update of its own, that of plain SGD; it divides by nothing:

$ distcheck verify --strategy examples/forms/own_optimizer.py:SummingSGD --world 4
FAIL missing-division
"""

import torch
import torch.distributed as dist


class DistributedSGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
        return super().step(closure)


class SummingSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.add_(p.grad, alpha=-group["lr"])
