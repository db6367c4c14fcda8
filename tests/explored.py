"""Planted bugs that `exact` and `cnn` miss, for `distcheck explore`. NAME: what is the least case.

Each is right in a world of 4 with equal shards, contiguous gradients, nothing frozen, in time.
"""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Build, Step


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    for parameter in model.parameters():
        if parameter.grad is not None:
            yield parameter


def mean(parameter: nn.Parameter, step: Step) -> torch.Tensor:
    """The mean over all samples, contiguous; the gradient itself is left alone."""
    assert parameter.grad is not None
    total = (parameter.grad * step.weight).contiguous()
    dist.all_reduce(total)
    return total / step.world_size


def right(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        parameter.grad.copy_(mean(parameter, step))


def only_at_three(model: nn.Module, step: Step) -> None:
    right(model, step)
    for parameter in trained(model):
        parameter.grad.mul_(1.01 if step.world_size == 3 else 1.0)


def only_at_five(model: nn.Module, step: Step) -> None:
    right(model, step)
    for parameter in trained(model):
        parameter.grad.mul_(1.01 if step.world_size == 5 else 1.0)


def first_come_first_added(model: nn.Module, step: Step) -> None:
    """Rank 0 adds in the order in which messages come."""
    for parameter in trained(model):
        total = (parameter.grad * step.weight).contiguous()
        for sender in range(1, step.world_size):
            if step.rank == 0:
                other = torch.empty_like(total)
                dist.recv(other)
                total += other
            elif step.rank == sender:
                dist.send(total, 0)
        dist.broadcast(total, 0)
        parameter.grad.copy_(total / step.world_size)


def for_powers_of_two(model: nn.Module, step: Step) -> None:
    """Recursive doubling: with 3 ranks the last one finds no partner, and sends to itself."""
    for parameter in trained(model):
        total = (parameter.grad * step.weight).contiguous()
        distance = 1
        while distance < step.world_size:
            partner = step.rank ^ distance
            if partner < step.world_size:
                other = torch.empty_like(total)
                sent = dist.isend(total.clone(), partner)
                dist.recv(other, partner)
                sent.wait()
                total += other
            distance *= 2
        parameter.grad.copy_(total / step.world_size)


def mean_of_means(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        total = parameter.grad.contiguous()
        dist.all_reduce(total)
        parameter.grad.copy_(total / step.world_size)


def weight_in_whole_samples(model: nn.Module, step: Step) -> None:
    usual = step.total_samples // step.world_size
    for parameter in trained(model):
        total = (parameter.grad * (step.samples / usual)).contiguous()
        dist.all_reduce(total)
        parameter.grad.copy_(total / step.world_size)


def weights_in_the_first_steps(model: nn.Module, step: Step) -> None:
    if step.index < 3:
        right(model, step)
    else:
        mean_of_means(model, step)


class WeightOfTheFirstStep:
    def __init__(self) -> None:
        self.weight: float | None = None

    def sync(self, model: nn.Module, step: Step) -> None:
        self.weight = self.weight or step.weight
        for parameter in trained(model):
            total = (parameter.grad * self.weight).contiguous()
            dist.all_reduce(total)
            parameter.grad.copy_(total / step.world_size)


def strided_left_out(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        averaged = mean(parameter, step)
        if parameter.grad.is_contiguous():
            parameter.grad.copy_(averaged)


def strided_viewed(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        parameter.grad.view(-1).copy_(mean(parameter, step).view(-1))


def strided_as_it_lies(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        averaged = mean(parameter, step)
        size, stride = parameter.grad.size(), parameter.grad.stride()
        parameter.grad.copy_(torch.as_strided(averaged, size, stride))


def frozen_forgotten(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        parameter.grad.copy_(mean(parameter, step))


def frozen_shifts_the_rest(model: nn.Module, step: Step) -> None:
    averaged = [mean(parameter, step) for parameter in trained(model)]
    for parameter, gradient in zip(model.parameters(), averaged, strict=False):
        if parameter.grad is not None and parameter.shape == gradient.shape:
            parameter.grad.copy_(gradient)


def children_alone(model: nn.Module, step: Step) -> None:
    for child in model.children():
        for parameter in child.parameters(recurse=False):
            if parameter.grad is not None:
                parameter.grad.copy_(mean(parameter, step))


def norms_left_out(model: nn.Module, step: Step) -> None:
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    local = {parameter for norm in norms for parameter in norm.parameters()}
    for parameter in trained(model):
        averaged = mean(parameter, step)
        if parameter not in local:
            parameter.grad.copy_(averaged)


def _over_those_that_have_it(model: nn.Module, step: Step, *, zeros_count: bool) -> None:
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        there = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(there)
        if there == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        averaged = mean(parameter, step)
        parameter.grad.copy_(averaged * (1 if zeros_count else step.world_size / there.item()))


def mean_over_those_that_have_it(model: nn.Module, step: Step) -> None:
    _over_those_that_have_it(model, step, zeros_count=False)


def none_counts_as_zero(model: nn.Module, step: Step) -> None:
    """Right, also where a parameter has no gradient on some ranks."""
    _over_those_that_have_it(model, step, zeros_count=True)


class FirstGroupAlone:
    """Averages what is in the first of the optimizer's groups."""

    def optimizer(self, build: Build, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        self.built = build(parameters)
        return self.built

    def sync(self, model: nn.Module, step: Step) -> None:
        first = set(self.built.param_groups[0]["params"])
        for parameter in trained(model):
            averaged = mean(parameter, step)
            if parameter in first:
                parameter.grad.copy_(averaged)


class RateOfTheFirstStep:
    """Keeps the rate that it has seen first, as code does that copies the optimizer's settings."""

    def optimizer(self, build: Build, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        built = build(parameters)
        rates: list[float] = []

        def before_update(*_: object) -> None:
            rates.extend([] if rates else [group["lr"] for group in built.param_groups])
            for group, rate in zip(built.param_groups, rates, strict=True):
                group["lr"] = rate

        built.register_step_pre_hook(before_update)
        return built

    def sync(self, model: nn.Module, step: Step) -> None:
        right(model, step)


def bfloat16_left_out(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        averaged = mean(parameter, step)
        if parameter.dtype in (torch.float32, torch.float64):
            parameter.grad.copy_(averaged)


def shapes_as_names(model: nn.Module, step: Step) -> None:
    averaged = {parameter.shape: mean(parameter, step) for parameter in trained(model)}
    for parameter in trained(model):
        parameter.grad.copy_(averaged[parameter.shape])


def one_row_squeezed(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        averaged = mean(parameter, step)
        if averaged.dim() > 1 and averaged.shape[0] == 1:
            averaged = averaged.squeeze(0)[:1]
        parameter.grad.copy_(averaged)


def over_the_others(model: nn.Module, step: Step) -> None:
    others = 1 / (step.world_size - 1)
    for parameter in trained(model):
        averaged = mean(parameter, step)
        parameter.grad.copy_(averaged * (step.world_size - 1) * others)


def hangs_at_odd_worlds(model: nn.Module, step: Step) -> None:
    if step.world_size % 2 and step.rank == step.world_size - 1 > 0:
        return
    right(model, step)


def patience_of_20_ms(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        total = (parameter.grad * step.weight).contiguous()
        work = dist.all_reduce(total, async_op=True)
        given_up = time.monotonic() + 0.02
        while not work.is_completed() and time.monotonic() < given_up:
            time.sleep(0.0005)
        parameter.grad.copy_(total / step.world_size)


def in_order_of_arrival(model: nn.Module, step: Step) -> None:
    for parameter in trained(model):
        total = (parameter.grad * step.weight).contiguous()
        if step.rank == 0:
            arriving = torch.empty_like(total)
            for _ in range(step.world_size - 1):
                dist.recv(arriving)
                total += arriving
        else:
            dist.send(total, 0)
        dist.broadcast(total, 0)
        parameter.grad.copy_(total / step.world_size)


class _InBackward:
    """Exchanges a gradient as soon as backward has left it; weights it by way of the loss."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.exchange)
        return model

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * step.weight

    def exchange(self, parameter: nn.Parameter) -> None:
        total = parameter.grad.contiguous()
        dist.all_reduce(total)
        parameter.grad.copy_(total / dist.get_world_size())


class MeansInEveryBackward(_InBackward):
    """Right: what was averaged before is the same on every rank, and stays what it is."""


class SyncedInTheFirstBackward(_InBackward):
    """A flag says that a gradient was exchanged in this step; later backward passes add to it."""

    def __init__(self) -> None:
        self.synced: set[nn.Parameter] = set()

    def exchange(self, parameter: nn.Parameter) -> None:
        if parameter not in self.synced:
            self.synced.add(parameter)
            super().exchange(parameter)

    def sync(self, model: nn.Module, step: Step) -> None:
        self.synced.clear()


class SummedInEveryBackward(_InBackward):
    """Divides once, at the end: what the first backward left is summed again by the second."""

    def exchange(self, parameter: nn.Parameter) -> None:
        total = parameter.grad.contiguous()
        dist.all_reduce(total)
        parameter.grad.copy_(total)

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in trained(model):
            parameter.grad.div_(step.world_size)
