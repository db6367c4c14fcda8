"""Gradients that are complete on one rank alone: the one that updates the parameter."""

import torch
import torch.distributed as dist

from distcheck.contract import strategy

from . import right


class Owning(torch.optim.Optimizer):
    """Every rank updates the parameters that it owns, by the rate that is set here, and broadcasts
    them.
    """

    def __init__(self, inner, parameters):
        super().__init__(parameters, {})
        self.optim = inner

    def step(self, closure=None):
        for group in self.optim.param_groups:
            group["lr"] = self.param_groups[0].get("lr", group["lr"])
        self.optim.step()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            dist.broadcast(parameter.data, index % dist.get_world_size())


@right
@strategy(optimizer_state="sharded", gradients="owner", one_group=True)
class ReducesToOwners:
    """ZeRO-2: each gradient is reduced to the rank that updates the parameter, and dropped on half
    of the others, which hold what `reduce` left.
    """

    def optimizer(self, build, parameters):
        self.parameters = list(parameters)
        own = self.parameters[dist.get_rank() :: dist.get_world_size()]
        return Owning(build(own), self.parameters)

    def sync(self, model, step):
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            owner = index % step.world_size
            parameter.grad.mul_(step.weight / step.world_size)
            dist.reduce(parameter.grad, owner)
            if step.rank == (owner + 1) % step.world_size:
                parameter.grad = None
