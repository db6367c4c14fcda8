"""Hooks, threads and handles that are waited for, and the wrappers that torch has."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import strategy

from . import right


def _begin(gradient, step):
    gradient.mul_(step.weight / step.world_size)
    return dist.all_reduce(gradient, async_op=True)


def _gradients(model):
    return [p.grad for p in model.parameters() if p.grad is not None]


@right
def waits_backwards(model, step):
    """Waits from the last handle to the first."""
    works = [_begin(gradient, step) for gradient in _gradients(model)]
    for work in reversed(works):
        work.wait()


@right
def polls(model, step):
    """Asks until all are done, and waits for each, which raises what went wrong."""
    works = [_begin(gradient, step) for gradient in _gradients(model)]
    while works:
        works = [work for work in works if not (work.is_completed() and work.wait())]


@right
def window_of_three(model, step):
    """No more than three under way."""
    under_way = []
    for gradient in _gradients(model):
        if len(under_way) == 3:
            under_way.pop(0).wait()
        under_way.append(_begin(gradient, step))
    for work in under_way:
        work.wait()


@right
def futures_that_divide(model, step):
    """The division is what follows on each future."""
    done = []
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        future = dist.all_reduce(gradient, async_op=True).get_future()
        done.append(future.then(lambda f: f.value()[0].div_(step.world_size)))
    for future in done:
        future.wait()


@right
def one_thread(model, step):
    """The exchange runs in a thread, which is joined."""

    def exchange():
        for gradient in _gradients(model):
            _begin(gradient, step).wait()

    thread = threading.Thread(target=exchange)
    thread.start()
    thread.join()


@right
class PoolOfOne:
    """A pool with one thread keeps the order of collectives; every result is asked for."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(1)

    def sync(self, model, step):
        done = [self.pool.submit(self.exchange, g, step) for g in _gradients(model)]
        for future in done:
            future.result()

    @staticmethod
    def exchange(gradient, step):
        _begin(gradient, step).wait()

    def close(self):
        self.pool.shutdown()


@right
def queue_between_threads(model, step):
    """One thread divides what another has received."""
    received = queue.Queue()

    def divide():
        while (gradient := received.get()) is not None:
            gradient.div_(step.world_size)

    thread = threading.Thread(target=divide)
    thread.start()
    for gradient in _gradients(model):
        gradient.mul_(step.weight)
        dist.all_reduce(gradient)
        received.put(gradient)
    received.put(None)
    thread.join()


@right
class TwoGroups:
    """Even parameters in one group of all ranks, odd ones in another, at once."""

    def wrap(self, model):
        self.groups = [dist.new_group(), dist.new_group()]
        return model

    def sync(self, model, step):
        works = []
        for number, gradient in enumerate(_gradients(model)):
            gradient.mul_(step.weight / step.world_size)
            group = self.groups[number % 2]
            works.append(dist.all_reduce(gradient, group=group, async_op=True))
        for work in works:
            work.wait()


class _Hooks:
    step = None

    def scale_loss(self, loss, step):
        self.step = step
        return loss


@right
class HooksThatWaitInSync(_Hooks):
    """Hooks begin, the sync waits."""

    def __init__(self):
        self.works = []

    def wrap(self, model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: self.works.append(_begin(p.grad, self.step))
            )
        return model

    def sync(self, model, step):
        for work in self.works:
            work.wait()
        self.works.clear()


@right
class TensorHooks(_Hooks):
    """Hooks on tensors, which return the mean in place of the gradient."""

    def wrap(self, model):
        for parameter in model.parameters():
            parameter.register_hook(self.exchange)
        return model

    def exchange(self, gradient):
        mean = gradient * self.step.weight
        dist.all_reduce(mean)
        return mean / self.step.world_size


@right
class CountsDown(_Hooks):
    """Hooks count, and the last one exchanges everything in one buffer."""

    def wrap(self, model):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.left = len(self.parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.count)
        return model

    def count(self, parameter):
        self.left -= 1
        if self.left == 0:
            self.left = len(self.parameters)
            flat = torch.cat([p.grad.reshape(-1) for p in self.parameters])
            _begin(flat, self.step).wait()
            parts = flat.split([p.numel() for p in self.parameters])
            for held, part in zip(self.parameters, parts, strict=True):
                held.grad.copy_(part.view_as(held))


@right
class StepHook:
    """In a hook of the optimizer's step; the model is left as it is."""

    def wrap(self, model):
        return model

    def optimizer(self, build, parameters):
        parameters = list(parameters)
        made = build(parameters)
        made.register_step_pre_hook(lambda *_: self.exchange(parameters))
        return made

    def scale_loss(self, loss, step):
        self.step = step
        return loss

    def exchange(self, parameters):
        for parameter in parameters:
            if parameter.grad is not None:
                _begin(parameter.grad, self.step).wait()


class _DDP:
    options = {}  # noqa: RUF012

    def wrap(self, model):
        return DistributedDataParallel(model, **self.options)

    def scale_loss(self, loss, step):
        return loss * step.weight


@right
class DDPOfTinyBuckets(_DDP):
    """DDP with buckets of 4 KiB."""

    options = {"bucket_cap_mb": 0.004}  # noqa: RUF012


@right
class DDPViewsOfSmallBuckets(_DDP):
    """Gradients are views of buckets of 1 MiB, unused ones are looked for."""

    options = {  # noqa: RUF012
        "bucket_cap_mb": 1, "gradient_as_bucket_view": True, "find_unused_parameters": True,
    }  # fmt: skip


@right
class DDPWithoutBuffers(_DDP):
    """DDP that leaves buffers alone."""

    options = {"broadcast_buffers": False}  # noqa: RUF012


@right
class DDPStatic(_DDP):
    """DDP with a static graph, and views."""

    options = {"static_graph": True, "gradient_as_bucket_view": True}  # noqa: RUF012


@right
class DDPOwnGroup(_DDP):
    """DDP over a group of its own."""

    def wrap(self, model):
        return DistributedDataParallel(model, process_group=dist.new_group())


@right
class HookByReduceAndBroadcast(_DDP):
    """A comm hook that reduces to rank 0 and broadcasts."""

    def wrap(self, model):
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(None, self.exchange)
        return wrapped

    @staticmethod
    def exchange(state, bucket):
        flat = bucket.buffer().div_(dist.get_world_size())
        dist.reduce(flat, 0)
        dist.broadcast(flat, 0)
        future = torch.futures.Future()
        future.set_result(flat)
        return future


@right
class HookInDouble(_DDP):
    """A comm hook that adds up in float64."""

    def wrap(self, model):
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(None, self.exchange)
        return wrapped

    @staticmethod
    def exchange(state, bucket):
        flat = bucket.buffer()
        wide = flat.double() / dist.get_world_size()
        future = dist.all_reduce(wide, async_op=True).get_future()
        return future.then(lambda done: flat.copy_(done.value()[0]))


@right
class HookOfTorch(_DDP):
    """torch's own hook, given the group."""

    def wrap(self, model):
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        return wrapped


@right
class NoopHookAndOwnExchange(_DDP):
    """DDP exchanges nothing; the sync does."""

    def wrap(self, model):
        wrapped = super().wrap(model)
        wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
        return wrapped

    def scale_loss(self, loss, step):
        return loss

    def sync(self, model, step):
        for gradient in _gradients(model):
            _begin(gradient, step).wait()


@right
@strategy(optimizer_state="sharded")
class ZeroWithOwnExchange:
    """The optimizer's state is divided among ranks; gradients are exchanged by hand."""

    def optimizer(self, build, parameters):
        groups = build(parameters).param_groups
        return ZeroRedundancyOptimizer(groups, optimizer_class=build)

    def sync(self, model, step):
        for gradient in _gradients(model):
            _begin(gradient, step).wait()


@right
@strategy(optimizer_state="sharded")
class ZeroOverDDP(_DDP):
    """The same over DDP, with parameters in buckets."""

    def optimizer(self, build, parameters):
        groups = build(parameters).param_groups
        return ZeroRedundancyOptimizer(
            groups, optimizer_class=build, parameters_as_bucket_view=True
        )
