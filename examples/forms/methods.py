"""A method of an agent or of a model; no object of the class has to be made.

$ distcheck verify --strategy examples/forms/methods.py:PPO.average_gradients --world 4
PASS

$ distcheck verify --strategy examples/forms/methods.py:Net.sync_grads --world 4
PASS

An attribute of its own is said with --arg self.NAME:

$ distcheck verify --strategy examples/forms/methods.py:PPO.scaled --arg self.coef=0.25 --world 4
PASS

$ distcheck verify --strategy examples/forms/methods.py:PPO.scaled --world 4
refused: uses self.coef, which distcheck does not know; pass --arg self.coef=VALUE

A `break` where `continue` was meant leaves all that follows the first bias alone:

$ distcheck verify --strategy examples/forms/methods.py:PPO.stops_early --world 4
FAIL partial-sync
"""

import torch.distributed as dist
from torch import nn


class PPO:
    def __init__(self, env, hidden_sizes, lr):
        self.env = env
        self.policy = nn.Linear(env.observations, env.actions)
        self.world_size = dist.get_world_size()

    def average_gradients(self):
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world_size

    def scaled(self):
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
            p.grad *= self.coef

    def stops_early(self):
        for p in self.policy.parameters():
            if p.dim() == 1:
                break
            dist.all_reduce(p.grad)
            p.grad /= self.world_size


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.layers(x)

    def sync_grads(self):
        for p in self.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
