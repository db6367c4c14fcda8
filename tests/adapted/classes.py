"""Wrappers, agents, optimizers, comm hooks."""

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.data, src=0)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class OverlappedDDP(nn.Module):
    """Hooks begin, finish waits, reset forgets."""

    def __init__(self, module: nn.Module, bucket_size_mb: float = 1.0):
        super().__init__()
        self.module, self.handles = module, []
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self._begin)

    def _begin(self, p):
        p.grad /= dist.get_world_size()
        self.handles.append(dist.all_reduce(p.grad, async_op=True))

    def forward(self, x):
        return self.module(x)

    def wait_all(self):
        for handle in self.handles:
            handle.wait()

    def reset(self):
        self.handles.clear()


class OddlyNamed(NaiveDDP):
    finish_gradient_synchronization = None

    def zzz(self):
        NaiveDDP.finish_gradient_synchronization(self)


class LeansOnReset(nn.Module):
    """The second step is only synchronized if `start_over` was called after the first."""

    def __init__(self, module, world_size):
        super().__init__()
        self.module, self.size, self.done = module, world_size, False

    def forward(self, x):
        return self.module(x)

    def sync_gradients(self):
        if not self.done:
            for p in self.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(self.size)
        self.done = True

    def start_over(self):
        self.done = False


class Plain:
    """No module at all: it has the model and calls it."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)

    def sync_gradients(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Reducer:
    """Beside the model, not in its place."""

    def __init__(self, model, world_size):
        self.params, self.size = list(model.parameters()), world_size

    def reduce_gradients(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.size


class WeightsInPlace:
    def scale_loss(self, loss, step):
        loss *= step.weight
        return loss

    def sync(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Copies(nn.Module):
    def __init__(self, module):
        super().__init__()
        import copy

        self.module = copy.deepcopy(module)

    def forward(self, x):
        return self.module(x)


class DividedInPlace(nn.Module):
    """Parameters stay the same objects: whole while they are worked with, else this rank's rows."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shapes = {p: p.shape for p in module.parameters()}
        for p in module.parameters():
            p.data = self.shard(p.data)

    def shard(self, whole):
        length = -(-whole.numel() // self.size)
        padded = whole.new_zeros(length * self.size)
        padded[: whole.numel()] = whole.flatten()
        return padded[self.rank * length :][:length].clone()

    def gather(self, p):
        pieces = [torch.empty_like(p.data) for _ in range(self.size)]
        dist.all_gather(pieces, p.data)
        shape = self.shapes[p]
        return torch.cat(pieces)[: shape.numel()].view(shape)

    def forward(self, x):
        for p in self.module.parameters():
            p.data = self.gather(p)
        return self.module(x)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            whole, p.grad = p.grad / self.size, None
            dist.all_reduce(whole)
            p.data = self.shard(p.data)
            p.grad = self.shard(whole)


class GathersOnce(DividedInPlace):
    """The second step works with the parameters of the first."""

    gathered = None

    def gather(self, p):
        self.gathered = self.gathered or {}
        if p not in self.gathered:
            self.gathered[p] = super().gather(p)
        return self.gathered[p]


class TouchesAPiece(DividedInPlace):
    """From the second step on, one rank's piece shrinks by a millionth."""

    steps = 0

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.steps += 1
        if self.steps > 1 and self.rank == 1:
            next(self.module.parameters()).data.mul_(1 - 1e-6)


class DividedByParameter:
    """No module: every rank holds some whole parameters (its shard), and nothing of the others."""

    def __init__(self, model):
        self.model = model
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.whole = list(model.parameters())
        self.shards = [nn.Parameter(p.detach().clone()) for p in self.whole[self.rank :: self.size]]

    def parameters(self):
        return self.shards

    def __call__(self, x):
        self.all_gather()
        return self.model(x)

    def all_gather(self):
        for i, p in enumerate(self.whole):
            p.grad = None
            if i % self.size == self.rank:
                p.data.copy_(self.shards[i // self.size])
            dist.broadcast(p.data, src=i % self.size)

    def sync_gradients(self):
        for i, p in enumerate(self.whole):
            dist.reduce(p.grad, dst=i % self.size)
            if i % self.size == self.rank:
                self.shards[i // self.size].grad = p.grad / self.size


class SyncsInForward(nn.Module):
    """A module that is handed a model, and no part of one."""

    def forward(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Agent:
    def __init__(self, observations, actions, lr):
        raise AssertionError("never made here")

    def average_gradients(self):
        for p in self.policy.parameters():
            self._mean(p.grad)

    def _mean(self, grad):
        dist.all_reduce(grad)
        grad /= self.world_size

    def forgets(self):
        for p in list(self.policy.parameters())[1:]:
            self._mean(p.grad)

    def uses_unknown(self):
        self.replay_buffer.clear()

    def with_scale(self):
        for p in self.policy.parameters():
            dist.all_reduce(p.grad)
            p.grad *= self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def sync_grads(self):
        for p in self.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Communicator:
    def __init__(self, rank, world_size):
        self.size = world_size

    def sync(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.size


class SyncingOptimizer:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        self.optimizer.step()


class StepsFirst(SyncingOptimizer):
    """Synchronizes when it is too late."""

    def step(self):
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


class NeverSteps(SyncingOptimizer):
    def step(self):
        pass


def mean_hook(state, bucket):
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Never divides."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])


def hook_with_group(process_group: dist.ProcessGroup, bucket: dist.GradBucket):
    flat = bucket.buffer().div_(process_group.size())
    work = dist.all_reduce(flat, group=process_group, async_op=True)
    return work.get_future().then(lambda f: f.value()[0])


class HookState:
    def __init__(self, world_size):
        self.size = world_size


def hook_with_state(state, bucket):
    flat = bucket.buffer().div_(state.size)
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda f: f.value()[0])


class HookOwner:
    def hook(self, state, bucket):
        return mean_hook(state, bucket)


class ShardedOptimizer(torch.optim.Optimizer):
    """Each rank steps every W-th parameter, and tells the others."""

    def __init__(self, params, optimizer_cls, **kwargs):
        self.inner = None
        self.kwargs, self.cls = kwargs, optimizer_cls
        self.listed = list(params)
        super().__init__(self.listed, kwargs)
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = [p for i, p in enumerate(self.listed) if i % size == rank]
        self.inner = optimizer_cls(mine, **kwargs)

    def step(self, closure=None, **kwargs):
        self.inner.step(closure, **kwargs)
        self.tell()

    def tell(self):
        for i, p in enumerate(self.listed):
            dist.broadcast(p.data, src=i % dist.get_world_size())


class KeepsItToItself(ShardedOptimizer):
    """The updated parameters are never told."""

    def tell(self):
        pass


class Both:
    """Two models, one of which is trained here."""

    def __init__(self, actor, critic):
        self.actor, self.critic = actor, critic

    def average(self):
        for p in self.actor.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        if dist.get_world_size() > 100:
            self.critic.zero_grad()


class InAStepHook:
    """Has nothing but an optimizer, in whose step hook gradients are averaged."""

    divisor = 1.0

    def optimizer(self, build, parameters):
        made = build(parameters)
        made.register_step_pre_hook(self._exchange)
        return made

    def _exchange(self, made, args, kwargs):
        for group in made.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size() * self.divisor


class InAWrongStepHook(InAStepHook):
    divisor = 2.0
