"""An optimizer whose state is divided among the ranks (ZeRO 1): each steps its own parameters.

$ distcheck verify --strategy examples/forms/optimizer_sharded.py:ShardedOptimizer --world 4
PASS

Updated parameters are never sent to the others:

$ distcheck verify --strategy examples/forms/optimizer_sharded.py:KeepsItToItself --world 4
FAIL missing-broadcast
"""

import torch
import torch.distributed as dist


class ShardedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **kwargs):
        self.all_params = list(params)
        super().__init__(self.all_params, kwargs)
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = [p for i, p in enumerate(self.all_params) if i % size == rank]
        self.inner = optimizer_cls(mine or [torch.nn.Parameter(torch.zeros(0))], **kwargs)

    def step(self, closure=None):
        self.inner.step()
        self.broadcast()

    def broadcast(self):
        for i, p in enumerate(self.all_params):
            dist.broadcast(p.data, src=i % dist.get_world_size())


class KeepsItToItself(ShardedOptimizer):
    def broadcast(self):
        pass
