"""Code whose form is guessed wrong at first, or cannot be known; and wrong twins."""

from typing import Any

import torch
import torch.distributed as dist


class Switched:
    """Off until its loop switches it on."""

    def __init__(self, model):
        self.model, self.on = model, False

    def __call__(self, x):
        return self.model(x)

    def switch_on(self):
        self.on = True

    def switch_off(self):
        self.on = False

    def sync_gradients(self):
        for p in self.model.parameters() if self.on else ():
            dist.all_reduce(p.grad)
            p.grad /= self.divisor()

    @staticmethod
    def divisor():
        return dist.get_world_size()


class SwitchedSum(Switched):
    """Right in no form, and explained in one."""

    @staticmethod
    def divisor():
        return 1


class EitherWay:
    """Two methods that do the same: which one does the loop call?"""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)

    def one(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    def other(self):
        self.one()


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


class MeansInBackward(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        through = {n: Mean.apply(p) for n, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, through, (x,))


class AroundInner:
    """Each rank steps some parameters; nothing calls its parameter an optimizer."""

    def __init__(self, inner):
        self.inner = inner
        self.params = [p for group in inner.param_groups for p in group["params"]]
        own = {id(p) for p in self.params[dist.get_rank() :: dist.get_world_size()]}
        for group in inner.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in own]

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.inner.step()
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=i % dist.get_world_size())

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class StepsItsShare(torch.optim.SGD):
    """A rank keeps the gradients of its own parameters, and sends on what it makes of them."""

    @torch.no_grad()
    def step(self, closure=None):
        world, rank = dist.get_world_size(), dist.get_rank()
        trained = [p for group in self.param_groups for p in group["params"]]
        for i, p in enumerate(trained):
            dist.reduce(p.grad, dst=i % world)
            p.grad = p.grad / world if i % world == rank else None
        super().step(closure)
        for i, p in enumerate(trained):
            self.send(p.data, i % world)

    def send(self, tensor, owner):
        dist.broadcast(tensor, src=owner)


class ForgetsToSend(StepsItsShare):
    def send(self, tensor, owner):
        pass


def needs_a_setting(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=settings.group)
        p.grad /= dist.get_world_size()


settings: Any = None


is_set_up = False


def needs_to_be_set_up(model):
    if not is_set_up:
        raise RuntimeError("communication was not set up")
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Warm:
    steps = 3


def hook_of_a_state(process_group, bucket):
    if process_group.steps > 2:
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
    return None


def of_marked_parameters(model):
    for p in model.parameters():
        if getattr(p, "is_replicated", False):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class OfOneProcess:
    """With its defaults it exchanges nothing; it is given pairs of names and parameters."""

    def __init__(self, world_size=1, rank=0):
        self.divisor = self.world_size = world_size

    def allreduce_gradients(self, named_params):
        if self.world_size == 1:
            return
        for _, p in named_params:
            dist.all_reduce(p.grad)
            p.grad /= self.divisor


class OfOneProcessSum(OfOneProcess):
    def __init__(self, world_size=1, rank=0):
        self.world_size, self.divisor = world_size, 1


class Sharding:
    """Around an optimizer; the loop calls `shard_gradients` after backward."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        mine = self.trained[dist.get_rank() :: dist.get_world_size()]
        optimizer.param_groups[0]["params"] = mine

    def shard_gradients(self):
        for i, p in enumerate(self.trained):
            dist.all_reduce(p.grad)
            p.grad = self.mean(p.grad) if i % dist.get_world_size() == dist.get_rank() else None

    def mean(self, total):
        return total / dist.get_world_size()

    def step(self):
        self.optimizer.step()
        for i, p in enumerate(self.trained):
            dist.broadcast(p.data, i % dist.get_world_size())

    def zero_grad(self):
        for p in self.trained:
            p.grad = None


class ShardingSum(Sharding):
    def mean(self, total):
        return total


class Node:
    """Gets its model later, and steps an optimizer that it makes."""

    def _init_node(self, model, rank, num_nodes):
        self.model, self.divisor = model, num_nodes
        self.optim = torch.optim.SGD(model.parameters(), lr=1.0)

    def zero_grad(self):
        self.optim.zero_grad()

    def step(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.divisor)
        self.optim.step()


class NodeKeepsGradients(Node):
    def zero_grad(self):
        pass


class Attached:
    """Gets its model later, and has it where it reduces."""

    def attach(self, model):
        self.params = list(model.parameters())

    def reduce_grads(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.divisor()

    def divisor(self):
        return dist.get_world_size()


class AttachedSum(Attached):
    def divisor(self):
        return 1


class Parallelized:
    """Registers its hooks when the loop calls `parallelize`, once; a second call doubles them."""

    def __init__(self, module):
        self.module = module

    def parallelize(self):
        for p in self.module.parameters():
            p.register_hook(self.reduced)
        return self.module

    def reduced(self, gradient):
        dist.all_reduce(gradient)
        return gradient / self.divisor()

    def divisor(self):
        return dist.get_world_size()


class ParallelizedSum(Parallelized):
    def divisor(self):
        return 1


def sum_or_mean(tensor, average=False):
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size() if average else tensor


def of_some_ranks(model, n_parts):
    """n_parts: how many gradients were added up."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= n_parts


def by_twice_its_argument(model, denominator):
    """Wrong whatever the number of ranks is; in a world of 2 right with 1."""
    of_some_ranks(model, 2 * denominator)


def of_a_loss_scale(model, denominator):
    """Forgets to divide by the number of ranks.

    denominator: the factor by which
        the loss was multiplied
    other: another thing
    """
    of_some_ranks(model, denominator)


def sums_over_a_scale(model, loss_scale):
    of_some_ranks(model, loss_scale)


def with_a_word(model, word, divisor=None):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=None if word == "default" else dist.group.WORLD)
        p.grad /= divisor or dist.get_world_size()


def with_a_word_sum(model, word):
    with_a_word(model, word, divisor=1)


def hook_of_a_state_sum(warm: Warm, bucket):
    assert warm.steps
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def of_a_wrapper(model, divisor=None):
    for p in model.module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= divisor or dist.get_world_size()


def of_a_wrapper_sum(model):
    for p in model.module.parameters():
        dist.all_reduce(p.grad)


def of_a_trainer(trainer):
    for p in trainer.model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= trainer.world_size


def of_a_trainer_sum(trainer):
    for p in trainer.model.parameters():
        dist.all_reduce(p.grad)


def of_a_part(thing):
    """If that is the model, it has more parameters than those of its encoder."""
    for p in thing.encoder.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Collects:
    def __init__(self, dp_group):
        self.modules = []

    def register(self, module):
        self.modules.append(module)

    def divisor(self):
        return dist.get_world_size()

    def sync(self):
        for module in self.modules:
            for p in module.parameters():
                dist.all_reduce(p.grad)
                p.grad /= self.divisor()


class CollectsSum(Collects):
    def divisor(self):
        return 1


class WithoutSettings(torch.optim.Optimizer):
    """Its groups have no learning rate: a schedule can change the inner optimizer's alone."""

    def __init__(self, params, opt):
        super().__init__(params, {})
        self.opt, self.divisor = opt, dist.get_world_size()

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.grad /= self.divisor
        self.opt.step()


class WithoutSettingsSum(WithoutSettings):
    def __init__(self, params, opt):
        super().__init__(params, opt)
        self.divisor = 1


class OfBoth(torch.nn.Module):
    """Made of the model and the optimizer that trains it."""

    def __init__(self, module, optimizer):
        super().__init__()
        self.module, self.divisor = module, dist.get_world_size()
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]

    def forward(self, x):
        return self.module(x)

    def sync_gradients(self):
        for p in self.trained:
            dist.all_reduce(p.grad)
            p.grad /= self.divisor


class OfBothSum(OfBoth):
    def __init__(self, module, optimizer):
        super().__init__(module, optimizer)
        self.divisor = 1


class Breaks(OfBoth):
    """In whatever way it is called."""

    def __init__(self, module):
        torch.nn.Module.__init__(self)
        self.module = module
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, async_op=True))

    def sync_gradients(self):
        pass


def of_groups(param_groups, divisor=None):
    for group in param_groups:
        for p in group["params"]:
            dist.all_reduce(p.grad)
            p.grad /= divisor or dist.get_world_size()


def of_groups_sum(parts):
    """Nothing but the use of its parameter tells what it is."""
    for part in parts:
        for p in part["params"]:
            dist.all_reduce(p.grad)


class RunsBackward(torch.optim.Optimizer):
    """Its closure returns the loss, and step() runs backward."""

    def __init__(self, params, local_opt):
        super().__init__(params, {})
        self.local_opt, self.divisor = local_opt, dist.get_world_size()

    def step(self, closure):
        self.differentiate(closure)
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= self.divisor
        self.local_opt.step()

    def differentiate(self, closure):
        loss = closure()
        self.zero_grad()
        loss.backward()


class RunsBackwardSum(RunsBackward):
    def __init__(self, params, local_opt):
        super().__init__(params, local_opt)
        self.divisor = 1


class NeedsClosure(RunsBackward):
    """Its closure runs backward, as those of torch's optimizers do."""

    def differentiate(self, closure):
        self.loss = closure()


class ClosesTwice(RunsBackward):
    def differentiate(self, closure):
        closure(), closure()


class HooksDDP:
    """Registers its hook on the module that DDP has made."""

    def __init__(self, made):
        made.register_comm_hook(self, self.hook)

    divided = True

    @staticmethod
    def hook(state, bucket):
        tensor = bucket.buffer() / (dist.get_world_size() if state.divided else 1)
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])


class HooksDDPSum(HooksDDP):
    divided = False


class HoldsDDP(HooksDDP):
    """The same, on an attribute that holds the module."""

    def __init__(self, module):
        self.module = module
        self.module.register_comm_hook(self, self.hook)


class HoldsDDPSum(HoldsDDP):
    divided = False


def if_distributed(params, is_distributed):
    if is_distributed and dist.is_initialized():
        for p in params:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def if_distributed_sum(params, is_distributed):
    if not is_distributed:
        return
    for p in params:
        dist.all_reduce(p.grad)


class IfGivenClosure(torch.optim.Optimizer):
    """Does not require a closure, and synchronizes only if it receives one."""

    def __init__(self, optimizer, dist):
        super().__init__(optimizer.param_groups, {})
        self.inner, self.comm = optimizer, dist

    def step(self, closure=None):
        if closure is not None:
            closure()
            for p in self.param_groups[0]["params"]:
                self.comm.all_reduce(p.grad)
                p.grad /= self.comm.get_world_size()
        self.inner.step()


class SendsLater:
    """Steps the parameters of a rank, and sends them in a method of its own."""

    def __init__(self, param_groups, dp_group, optimizer_cls=torch.optim.SGD, **settings):
        self.params = [p for group in param_groups for p in group["params"]]
        self.group = dp_group
        mine = self.params[dist.get_rank(dp_group) :: dist.get_world_size(dp_group)]
        self.inner = optimizer_cls(mine, **settings)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        self.inner.step()

    def sync_params(self):
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, self.owner(i), group=self.group)

    def owner(self, index):
        return index % dist.get_world_size()


class SendsOfOne(SendsLater):
    def owner(self, index):
        return 0


class PassesAllOn(torch.optim.SGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.divisor = dist.get_world_size()

    def step(self):
        for p in self.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
            p.grad /= self.divisor
        super().step()


class PassesAllOnSum(PassesAllOn):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.divisor = 1


class CallsRemoved(PassesAllOn):
    def step(self):
        removed: Any = dist
        removed.all_reduce_multigpu([p.grad for p in self.param_groups[0]["params"]])


def server(model, world_size=None, rankid=None, opt=None, divisor=None):
    """One rank steps for all, and sends its parameters; nothing of it has a usable default."""
    for p in model.parameters():
        dist.reduce(p.grad, 0)
        p.grad /= divisor or world_size
    if rankid == 0:
        opt.step()
    for p in model.parameters():
        p = p.data
        if rankid == 0:
            for other in range(1, world_size):
                dist.send(p, other)
        else:
            dist.recv(p, 0)


def server_sum(model, world_size=None, rankid=None, opt=None):
    server(model, world_size, rankid, opt, divisor=1)


def of_models(models):
    """Of one process: its ranks are a list."""
    for model in models:
        model.fc.weight.grad /= len(models)


def in_chunks(tensor, divisor=None):
    """Fails on a tensor with fewer rows than ranks."""
    pieces = torch.chunk(tensor, dist.get_world_size())
    assert len(pieces) == dist.get_world_size()
    for piece in pieces:
        dist.all_reduce(piece)
    tensor /= divisor or dist.get_world_size()


def in_chunks_sum(tensor):
    in_chunks(tensor, divisor=1)


def in_whole_chunks(tensor):
    """Drops what is left over of a division by the number of ranks."""
    rows = len(tensor) // dist.get_world_size()
    assert rows
    in_chunks(tensor[: rows * dist.get_world_size()])
