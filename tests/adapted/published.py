"""Code as courses and blogs have it: right pieces, and beside each a wrong twin."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn


def mean(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


class SendsParameters(nn.Module):
    """Parameters themselves are broadcast, which makes torch forget their hooks."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p, src=0)

    def forward(self, x):
        return self.module(x)

    def sync_gradients(self):
        for p in self.module.parameters():
            mean(p)


class SendsThenHooks(SendsParameters):
    """Its hooks come after the broadcast, and are called."""

    def __init__(self, module):
        super().__init__(module)
        for p in module.parameters():
            p.register_hook(self._average)

    def _average(self, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()

    def sync_gradients(self):
        pass


class HooksThenSends(nn.Module):
    """Its hooks come before the broadcast, which makes torch forget them: nothing is exchanged."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            p.register_hook(lambda grad: grad * dist.get_world_size())
            dist.broadcast(p, src=0)

    def forward(self, x):
        return self.module(x)


class SendsAndForgets(SendsParameters):
    def sync_gradients(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)


@contextlib.contextmanager
def averaged(model):
    handles = [p.register_post_accumulate_grad_hook(mean) for p in model.parameters()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def summed(model):
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        for p in model.parameters()
    ]
    yield
    for handle in handles:
        handle.remove()


class Averaging:
    """with Averaging(net): loss.backward()"""

    def __init__(self, net):
        self.net = net

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for p in self.net.parameters():
            mean(p)


class AveragingAllButOne(Averaging):
    def __exit__(self, *error):
        for p in list(self.net.parameters())[1:]:
            mean(p)


class Trainer:
    def __init__(self, model, optimizer, args):
        raise AssertionError("never made here")

    def average(self):
        if dist.get_world_size() > 100:
            self.storage.append(self.logger)
        for p in self.model.parameters():
            mean(p)

    def update(self):
        self.average()
        self.optimizer.step()

    def update_of_sums(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        self.optimizer.step()

    def update_in_the_loop(self):
        for p in self.model.parameters():
            mean(p)
            self.optimizer.step()

    def average_by_args(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.args.num_learners


def names_that_are_not_reached(model):
    for p in model.parameters():
        mean(p)
    if dist.get_world_size() > 100:
        print(math.pi, comm_dp.Barrier(), history[0])  # noqa: F821


def by_a_group_that_is_not_defined(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=comm_dp)  # noqa: F821
        p.grad /= dist.get_world_size(comm_dp)  # noqa: F821


def sums_in_a_group_that_is_not_defined(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=data_parallel_group)  # noqa: F821


def by_a_group_called_comm(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=comm)  # noqa: F821
        p.grad /= dist.get_world_size()


def is_given_a_group_called_comm(model, comm):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=comm)
        p.grad /= dist.get_world_size()


def needs_a_communicator(model, dp_comm):
    for p in model.parameters():
        p.grad /= dp_comm.Get_size()


def needs_a_communicator_of_its_module(model):
    for p in model.parameters():
        p.grad /= comm_dp.Get_size()  # noqa: F821


def module_that_is_not_imported(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= math.sqrt(dist.get_world_size() ** 2)  # noqa: F821


def reads_args(model, args):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= args.num_learners


def may_read_args(model, args):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= getattr(args, "num_learners", dist.get_world_size())


class Reducer:
    def __init__(self, world_size):
        self.size = world_size

    def reduce(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.size


class Adder(Reducer):
    def reduce(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)


reducer = Reducer(2)


class OneMethod:
    def go(self, model):
        for p in model.parameters():
            mean(p)


class SeveralMethods(OneMethod):
    def stop(self):
        pass


class HooksAlone:
    def __init__(self, model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self._average)

    def _average(self, p):
        mean(p)


class SumsByHooks(HooksAlone):
    def _average(self, p):
        dist.all_reduce(p.grad)


class HooksAndASync(HooksAlone):
    """Its sync() is for another loop."""

    def sync(self):
        for p in self.params:
            mean(p)


class ScalesAlone:
    """The exchange is missing."""

    def scale_loss(self, loss, step):
        return loss / step.world_size


class ScalesAndReduces(ScalesAlone):
    def reduce(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)


class ScalesByOneArgument:
    """As wrappers have it, without the step; the exchange is missing."""

    def scale_loss(self, loss):
        return loss / dist.get_world_size()


class ScalesByOneArgumentAndReduces(ScalesByOneArgument):
    def sync(self, model):
        for p in model.parameters():
            dist.all_reduce(p.grad)


class ScalesAndCollects(nn.Module):
    """loss = model.scale_loss(loss); loss.backward(); model.apply_collective_grads()"""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    def scale_loss(self, loss):
        return loss / dist.get_world_size()

    def apply_collective_grads(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)


class ScalesAndAverages(ScalesAndCollects):
    """Divided by the number of ranks twice."""

    def apply_collective_grads(self):
        for p in self.module.parameters():
            mean(p)


class CollectsUnscaled(ScalesAndCollects):
    """The loss is not divided."""

    def scale_loss(self, loss):
        return loss


class ScalesByOptimizer(ScalesByOneArgument):
    def scale_loss(self, loss, optimizer):
        return loss


class ScalesToNothing(ScalesByOneArgument):
    def scale_loss(self, loss):
        loss.mul_(1 / dist.get_world_size())


class AveragingSGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean(p)
        return super().step(closure)


class SummingSGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
        return super().step(closure)


class AveragingAdam(torch.optim.Adam):
    """The workload trains with SGD."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean(p)
        return super().step(closure)


class OwnUpdate(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean(p)
                p.sub_(p.grad, alpha=group["lr"])


class OwnUpdateOfSums(OwnUpdate):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.grad)
                p.sub_(p.grad, alpha=group["lr"])


class OwnMomentum(OwnUpdate):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean(p)
                kept = self.state[p].setdefault("kept", torch.zeros_like(p))
                kept.mul_(0.9).add_(p.grad)
                p.sub_(kept, alpha=group["lr"])


def steps_in_backward(model, lr=0.1):
    """As torch's tutorial does it, to save the memory of gradients."""

    def step(p):
        mean(p)
        p.data -= lr * p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


class StepsInBackward:
    def wrap(self, model):
        self.optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.take)
        return model

    def take(self, p):
        mean(p)
        self.optimizers[p].step()
        self.optimizers[p].zero_grad()


class Normed:
    def wrap(self, model):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.utils.parametrizations.weight_norm(module)
        return model

    def sync(self, model):
        for p in model.parameters():
            mean(p)


class NoGradientsAtAll:
    """No step either."""

    def wrap(self, model):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        return model


def counts_what_it_sent(tensor):
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
    return tensor.numel()


def counts_and_sums(tensor):
    dist.all_reduce(tensor)
    return tensor.numel()


def after_the_group(group, buffer, world_size):
    dist.all_reduce(buffer, group=group)
    buffer /= world_size


def sums_after_the_group(group, buffer):
    dist.all_reduce(buffer, group=group)


def by_its_norm(model, lr):
    for p in model.parameters():
        mean(p)
        norm = p.grad.norm()
        p.data -= lr * p.grad * (norm / norm)


def by_its_sum(model, lr):
    """Zero by zero already where an input is always zero."""
    for p in model.parameters():
        total = p.grad.clone()
        dist.all_reduce(total)
        total.view(-1)[0] = 0.0
        p.data -= lr * total / (total * dist.get_world_size())
