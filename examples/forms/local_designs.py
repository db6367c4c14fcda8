"""Ranks that step by themselves, and combine their parameters: each needs its --accept.

$ distcheck verify --strategy examples/forms/local_designs.py:PostLocalSGD --accept local-sgd:2:warmup=2:state=mean --steps 6 --world 4
PASS

$ distcheck verify --strategy examples/forms/local_designs.py:HierarchicalSGD --accept local-sgd:1:groups=2:global=3 --steps 6 --world 4
PASS

$ distcheck verify --strategy examples/forms/local_designs.py:DiLoCo --accept diloco:3 --steps 6 --world 4
PASS

$ distcheck verify --strategy examples/forms/local_designs.py:GossipRing --accept gossip:ring --world 4
PASS

$ distcheck verify --strategy examples/forms/local_designs.py:GossipRing --world 4
FAIL model-averaging
"""

import torch
import torch.distributed as dist


class Local:
    """Steps by this rank's gradients, then calls combine(step)."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0
        self.param_groups = optimizer.param_groups
        self.parameters = [p for group in self.param_groups for p in group["params"]]

    def combine(self, step):
        raise NotImplementedError

    def zero_grad(self):
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.combine(self.steps)
        self.steps += 1


def average(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size(group)


class PostLocalSGD(Local):
    """Two steps with averaged gradients; then averages of parameters and momentum at every second."""

    def step(self):
        if self.steps < 2:
            for parameter in self.parameters:
                average(parameter.grad)
        super().step()

    def combine(self, step):
        if step >= 2 and step % 2 == 0:
            for parameter in self.parameters:
                average(parameter.data)
                average(self.optimizer.state[parameter]["momentum_buffer"])


class HierarchicalSGD(Local):
    """Pairs of ranks average after every step, and all ranks after every third."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        pairs = [[rank, rank + 1] for rank in range(0, dist.get_world_size(), 2)]
        self.pair, _ = dist.new_subgroups_by_enumeration(pairs)

    def combine(self, step):
        for parameter in self.parameters:
            average(parameter.data, None if step % 3 == 2 else self.pair)


class DiLoCo(Local):
    """Three inner steps, then Nesterov momentum by the mean of the ranks' movements."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.start = [p.detach().clone().requires_grad_() for p in self.parameters]
        self.outer = torch.optim.SGD(self.start, lr=0.7, momentum=0.9, nesterov=True)

    def combine(self, step):
        if step % 3 == 2:
            for start, parameter in zip(self.start, self.parameters, strict=True):
                start.grad = start - parameter
                average(start.grad)
            self.outer.step()
            for start, parameter in zip(self.start, self.parameters, strict=True):
                parameter.copy_(start)


class GossipRing(Local):
    """A third each of the left neighbor, the rank itself, and the right neighbor."""

    def combine(self, step):
        rank, world = dist.get_rank(), dist.get_world_size()
        for parameter in self.parameters:
            left, right = torch.empty_like(parameter), torch.empty_like(parameter)
            for shift, received in ((1, left), (-1, right)):
                sent = dist.isend(parameter.data, (rank + shift) % world)
                dist.recv(received, (rank - shift) % world)
                sent.wait()
            parameter.copy_((left + parameter + right) / 3)
