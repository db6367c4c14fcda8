"""Parameters that are filled by what they are, and not by their place or name alone; and state that
a constructor, or a function that sets up, leaves behind.
"""

from abc import ABC, abstractmethod

import torch
import torch.distributed as dist

_flat = None
_shares: list[float] = []


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def takes_the_module(dist, net, world_size):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size


def takes_it_by_another_name(c, net):
    for p in net.parameters():
        c.all_reduce(p.grad)
        p.grad /= c.get_world_size()


def tensor_comes_second(args, tensor):
    dist.all_reduce(tensor)
    tensor /= args.world_size


def group_by_its_use(model, among):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=among)
        p.grad /= dist.get_world_size(among)


def model_by_its_use(rank, thing):
    """On the first rank, as a launcher with one process a machine numbers them."""
    average(thing)


def gathers_on_local_rank_0(model, args):
    for p in model.parameters():
        is_first = args.local_rank == 0
        parts = [torch.zeros_like(p.grad) for _ in range(args.world_size)] if is_first else None
        dist.gather(p.grad, parts, dst=0)
        mean = [sum(parts) / args.world_size] * args.world_size if is_first else None
        dist.scatter(p.grad, mean, src=0)


class Abstract(torch.nn.Module, ABC):
    @abstractmethod
    def act(self, x): ...

    def reduce_parameters(self):
        average(self)


class Agent(ABC):
    @abstractmethod
    def act(self, x): ...

    def average(self):
        average(self.policy)


def init_buffer(model):
    global _flat
    _flat = torch.zeros(sum(p.numel() for p in model.parameters()))


def through_a_buffer(model):
    parts = _flat.split([p.numel() for p in model.parameters()])
    for part, p in zip(parts, model.parameters(), strict=True):
        part.copy_(p.grad.flatten())
    dist.all_reduce(_flat)
    for part, p in zip(parts, model.parameters(), strict=True):
        p.grad.copy_(part.view_as(p.grad) / dist.get_world_size())


def prepare(world_size):
    _shares[:] = [1.0 / world_size] * world_size


def set_up(world_size):
    global _shares
    _shares = [1.0 / world_size] * world_size


def by_shares(model, rank):
    for p in model.parameters():
        p.grad *= _shares[rank]
        dist.all_reduce(p.grad)


class MadeOfTheOptimizer:
    def __init__(self, model, optimizer, epochs=3):
        self.listed = [p for group in optimizer.param_groups for p in group["params"]]
        self.count = 0

    def helper(self):
        return self.count

    def exchange(self):
        self.count += 1
        for p in self.listed:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def exchange_but_the_last(self):
        for p in self.listed[:-1]:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class WithOneMethod:
    def __init__(self, net):
        self.listed = list(net.parameters())

    def mingle(self):
        for p in self.listed:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class TimedReducer:
    """As code for compression has it: gradients in one list, the mean in another."""

    def __init__(self, device, timer, share=1.0):
        self.device, self.timer, self.share = device, timer, share

    def reduce(self, grad_in, grad_out):
        with self.timer("pack", verbosity=2):
            flat = torch.cat([g.flatten() for g in grad_in]).to(self.device)
        with self.timer("reduce"):
            dist.all_reduce(flat)
        parts = flat.split([g.numel() for g in grad_in])
        for out, part in zip(grad_out, parts, strict=True):
            out[:] = 0.0
            out.add_(part.view_as(out), alpha=self.share / dist.get_world_size())
        return 32 * flat.numel()


class HalfTimedReducer(TimedReducer):
    def __init__(self, device, timer):
        super().__init__(device, timer, share=0.5)


class ListsItsParameters:
    def __init__(self, net, is_server):
        self.listed, self.is_server = list(net.parameters()), is_server

    def wait_a_little(self):
        return self.is_server

    def mingle(self):
        for p in self.listed:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class NotAnOptimizerYet(torch.optim.Optimizer):
    """Its constructor asks for what only its author knows; the method needs little of it."""

    def __init__(self, params, local_opt, defaults):
        self.world_size, self.local_opt = dist.get_world_size(), local_opt
        super().__init__(params, defaults)

    def mean_of(self, tensor):
        dist.all_reduce(tensor)
        tensor /= self.world_size

    def sum_of(self, tensor):
        dist.all_reduce(tensor)

    def means_of(self, grads):
        for grad in grads:
            self.mean_of(grad)


class InParts(torch.nn.Module):
    def __init__(self, most=5):
        super().__init__()
        self.most = most

    def reduced(self, tensor):
        parts = list(tensor.flatten().split(self.most))
        for part in parts:
            dist.all_reduce(part)
        return torch.cat(parts).view_as(tensor) / dist.get_world_size()


class OnlyStatic:
    @staticmethod
    def all_reduce_gradients(model):
        average(model)


class OfTheClass:
    divisor = 2

    @classmethod
    def average_half(cls, model):
        average(model)
        for p in model.parameters():
            p.grad /= cls.divisor
