"""Correct strategies that promise nothing, or no order, in the forms that people's code has.

None may raise an alarm, at any world.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import strategy

# Built-in strategies that divide the layers of a model; each runs in its own worlds, on models
# that it can divide.
LAYOUTS = (
    "column_parallel", "context_parallel", "data_pipeline", "data_tensor", "expert_parallel",
    "pipeline", "pipeline_1f1b", "pipeline_by_hand", "row_parallel", "sequence_parallel",
    "tensor_parallel", "transformer_tensor",
)  # fmt: skip


def flat_buffer(model, step):
    """All gradients in one collective, scaled before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in gradients]) * (step.weight / step.world_size)
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def reduce_broadcast(model, step):
    """Rank 0 adds up, divides, and tells."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.samples)
        dist.reduce(parameter.grad, 0)
        if step.rank == 0:
            parameter.grad.div_(step.total_samples)
        dist.broadcast(parameter.grad, 0)


def gather_everywhere(model, step):
    """Every rank gathers all gradients and takes their mean."""
    for parameter in model.parameters():
        gradient = parameter.grad * step.weight
        found = [torch.empty_like(gradient) for _ in range(step.world_size)]
        dist.all_gather(found, gradient)
        parameter.grad = torch.stack(found).mean(0)


def asynchronous(model, step):
    """All collectives at once, then all waits."""
    works = []
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        works.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in works:
        work.wait()
    for parameter in model.parameters():
        parameter.grad.div_(step.world_size)


def in_double(model, step):
    """Sums in float64: closer than anything that is required."""
    for parameter in model.parameters():
        gradient = parameter.grad.double() * (step.samples / step.total_samples)
        dist.all_reduce(gradient)
        parameter.grad = gradient.to(parameter.dtype)


class SumOfLosses:
    """The loss is a sum over the shard; the sum over all is divided by the batch."""

    def scale_loss(self, loss, step):
        return loss * step.samples

    def sync(self, model, step):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.total_samples)


class LossScaling:
    """As mixed precision does it: a large factor on the loss, taken back before the sync."""

    def scale_loss(self, loss, step):
        return loss * 1024

    def sync(self, model, step):
        for parameter in model.parameters():
            parameter.grad.div_(1024).mul_(step.weight / step.world_size)
            dist.all_reduce(parameter.grad)


class BucketViews:
    """DDP with gradients that are views of its buckets."""

    def wrap(self, model):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def scale_loss(self, loss, step):
        return loss * step.weight


class AllReduceHook(BucketViews):
    """torch's own comm hook."""

    def wrap(self, model):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        return wrapped


class WeightInHook:
    """A comm hook that weights the bucket itself."""

    weight = 1.0

    def wrap(self, model):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(self, self.reduce)
        return wrapped

    def scale_loss(self, loss, step):
        self.weight = step.weight
        return loss

    @staticmethod
    def reduce(state, bucket):
        flat = bucket.buffer().mul_(state.weight / dist.get_world_size())
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])


class GradientHooks:
    """Synchronizes in hooks, parameter by parameter, while backward runs."""

    step = None

    def wrap(self, model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)
        return model

    def scale_loss(self, loss, step):
        self.step = step
        return loss

    def hook(self, parameter):
        parameter.grad.mul_(self.step.weight / self.step.world_size)
        dist.all_reduce(parameter.grad)


class OwnGroup:
    """Opens a process group of its own when it is made, and closes it."""

    def __init__(self):
        self.group = dist.new_group()

    def sync(self, model, step):
        for parameter in model.parameters():
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad.div_(step.world_size)

    def close(self):
        dist.destroy_process_group(self.group)


@strategy(wire="bfloat16")
def bfloat16_wire(model, step):
    """Lossy, and says so; in which order it adds is not promised."""
    for parameter in model.parameters():
        small = (parameter.grad * (step.weight / step.world_size)).to(torch.bfloat16)
        dist.all_reduce(small)
        parameter.grad.copy_(small)


@strategy(weighting="gradient", micro_batches=4)
class MicroBatches:
    """Gradient accumulation without DDP."""

    def backward(self, loss_of, batch, step):
        total = torch.zeros((), dtype=batch.inputs.dtype)
        for part in batch.split(4):
            loss = loss_of(part) * (len(part.ids) / step.samples)
            loss.backward()
            total += loss.detach()
        return total

    def sync(self, model, step):
        flat_buffer(model, step)


FORMS = (
    "bfloat16_wire", "MicroBatches",
    "flat_buffer", "reduce_broadcast", "gather_everywhere", "asynchronous", "in_double",
    "SumOfLosses", "LossScaling", "BucketViews", "AllReduceHook", "WeightInHook",
    "GradientHooks", "OwnGroup",
)  # fmt: skip
