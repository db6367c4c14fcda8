"""What newer torch has: functional collectives, foreach kernels, meshes, trees, module hooks."""

import functools
import weakref

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from distcheck.contract import strategy

from . import right


def _gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@right
def functional_collectives(model, step):
    """Collectives that return a tensor, which is waited for when it is used."""
    for gradient in _gradients(model):
        mean = functional.all_reduce(gradient * step.weight, "sum", dist.group.WORLD)
        gradient.copy_(functional.wait_tensor(mean) / step.world_size)


@right
def functional_scatter_and_gather(model, step):
    """reduce_scatter and all_gather of one padded vector, as functions."""
    gradients, world = _gradients(model), step.world_size
    flat = torch.cat([g.reshape(-1) for g in gradients]) * (step.weight / world)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % world))
    part = functional.reduce_scatter_tensor(flat, "sum", 0, dist.group.WORLD)
    whole = functional.all_gather_tensor(part, 0, dist.group.WORLD)
    whole = functional.wait_tensor(whole)
    at = 0
    for gradient in gradients:
        gradient.copy_(whole[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


@right
def foreach_kernels(model, step):
    """All tensors in one call before the exchange, and in one after it."""
    gradients = _gradients(model)
    torch._foreach_mul_(gradients, step.weight)
    for gradient in gradients:
        dist.all_reduce(gradient)
    torch._foreach_div_(gradients, float(step.world_size))


@right
@strategy(wire="float16")
def half_on_the_wire(model, step):
    """float16 between ranks, which is promised; weighted in float32."""
    for gradient in _gradients(model):
        short = (gradient * (step.weight / step.world_size)).half()
        dist.all_reduce(short)
        gradient.copy_(short)


@right
def mapped_as_a_tree(model, step):
    """Gradients as a tree of the modules, mapped to another tree and written back."""
    tree = {
        name: {n: p.grad for n, p in module.named_parameters(recurse=False) if p.grad is not None}
        for name, module in model.named_modules(remove_duplicate=True)
    }

    def mean(gradient):
        total = gradient * step.weight
        dist.all_reduce(total)
        return total / step.world_size

    means = pytree.tree_map(mean, tree)
    pytree.tree_map(lambda gradient, new: gradient.copy_(new), tree, means)


@right
class MeshGroup:
    """The group of a device mesh."""

    def wrap(self, model):
        self.group = init_device_mesh("cpu", (dist.get_world_size(),)).get_group()
        return model

    def sync(self, model, step):
        for gradient in _gradients(model):
            gradient.mul_(step.weight / step.world_size)
            dist.all_reduce(gradient, group=self.group)


@right
class WeakHooks:
    """Hooks hold parameters weakly; a partial of one function for each."""

    step = None

    def wrap(self, model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self.exchange, weakref.ref(parameter))
            )
        return model

    def scale_loss(self, loss, step):
        self.step = step
        return loss

    def exchange(self, held, _):
        gradient = held().grad
        gradient.mul_(self.step.weight / self.step.world_size)
        dist.all_reduce(gradient)


@right
class MeanInAFunction:
    """The exchange is an autograd function, which is applied to each gradient."""

    def wrap(self, model):
        self.model = model
        return model

    def scale_loss(self, loss, step):
        return loss * step.weight

    def sync(self, model, step):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = _Mean.apply(parameter.grad)


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(context, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(context, gradient):
        return gradient


@right
class BackwardPreHooks:
    """Full backward hooks on modules note which are done; the sync exchanges in that order."""

    def wrap(self, model):
        self.done = []
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_full_backward_hook(lambda m, *_: self.done.append(m))
        return model

    def sync(self, model, step):
        order = {p: n for n, p in enumerate(model.parameters())}
        seen = dict.fromkeys(p for m in self.done for p in m.parameters(recurse=False))
        self.done.clear()
        # Which modules a rank used is its own matter: the order of the rest is the model's.
        first = [p for p in seen if p.grad is not None]
        rest = sorted((p for p in order if p not in seen), key=order.__getitem__)
        for parameter in sorted([*first, *rest], key=order.__getitem__):
            if parameter.grad is not None:
                parameter.grad.mul_(step.weight)
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(step.world_size)


@right
def as_one_vector(model, step):
    """torch's own pair: parameters to a vector, and back."""
    gradients = _gradients(model)
    vector = nn.utils.parameters_to_vector(gradients) * step.weight
    dist.all_reduce(vector)
    nn.utils.vector_to_parameters(vector / step.world_size, gradients)


@right
def threads_of_its_own(model, step):
    """Two threads from the first exchange on, as a script that has the machine for itself."""
    torch.set_num_threads(2)
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient)
        gradient.div_(step.world_size)


@right
class ChannelsLast:
    """Convolutions in another memory order, which no parameter of five dimensions takes."""

    def wrap(self, model):
        return model.to(memory_format=torch.channels_last)

    def sync(self, model, step):
        for gradient in _gradients(model):
            gradient.mul_(step.weight)
            dist.all_reduce(gradient)
            gradient.div_(step.world_size)


@right
def buffers_after_the_sync(model, step):
    """Every rank ends the step with rank 0's."""
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient)
        gradient.div_(step.world_size)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
