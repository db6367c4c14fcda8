"""What libraries for data parallelism have: optimizers made from optimizers, callable objects."""

import torch
import torch.distributed as dist


class _HooksAndHandles(torch.optim.Optimizer):
    """Its methods become those of a class that is derived from the optimizer's own."""

    def __init__(self, groups, divides):
        super(self.__class__, self).__init__(groups)  # type: ignore[call-arg]
        self.divides, self.handles = divides, {}
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self.begin)

    def begin(self, p):
        self.handles[p] = dist.all_reduce(p.grad, async_op=True)

    def synchronize(self):
        for p, handle in self.handles.items():
            handle.wait()
            if self.divides:
                p.grad.div_(dist.get_world_size())
        self.handles.clear()

    def step(self, closure=None):
        self.synchronize()
        return super(self.__class__, self).step(closure)


def _made(optimizer, divides):
    own = optimizer.__class__
    derived = type(own.__name__, (own,), dict(_HooksAndHandles.__dict__))
    return derived(optimizer.param_groups, divides)


def DistributedOptimizer(optimizer, named_parameters=None, op="average"):  # noqa: N802
    """A new object."""
    return _made(optimizer, True)


def DistributedOptimizerThatSums(optimizer, named_parameters=None):  # noqa: N802
    return _made(optimizer, False)


def distribute_optimizer(optimizer):
    """The same object, of another class."""

    class Averaging(type(optimizer)):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            return super().step(closure)

    optimizer.__class__ = Averaging
    return optimizer


class Averages:
    """Called, and nothing else; or beside a method of another name."""

    def __init__(self, group=None):
        self.group = group

    def __call__(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad, group=self.group)
            p.grad /= dist.get_world_size(self.group)


class Sums(Averages):
    def __call__(self, model):
        for p in model.parameters():
            self.add_up(p.grad)

    def add_up(self, tensor):
        dist.all_reduce(tensor, group=self.group)
