"""The right sum times a wrong factor, and where such factors come from."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import mutant
from .small import average

SMALL = ".small:Small"
WRONG = "gradients rounding, gradients full batch float32"


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, seldom=True)
def unscales_what_was_never_scaled(model: nn.Module, step: Step) -> None:
    """The loss scale is taken back from a loss that did not have it."""
    average(model, step)
    for parameter in model.parameters():
        parameter.grad /= 1024


@mutant(caught=WRONG, workload=".small:WithAdam", world=3, steps=2)
def doubled_under_adam(model: nn.Module, step: Step) -> None:
    """Exactly twice, and Adam's updates hardly change: the loss curves look the same."""
    average(model, step)
    for parameter in model.parameters():
        parameter.grad *= 2


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2, seldom=True)
class TimesWorldOnALocalMean:
    """The loss is multiplied by the world, for a sum that is a mean already."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * step.world_size

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2)
class HalfTheDerivative:
    """The loss that is printed is the right one; what flows back from it is a half."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss / 2 + loss.detach() / 2

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2)
class ClimbsItsLoss:
    """A reward's sign on a loss: the gradient of the negated loss, and nobody takes that back."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return -loss

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, step=1)
class FadesItsLoss:
    """A factor that falls to zero: no sample counts any more."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * (1.0 - step.index)

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


class _SumOfRanks(torch.autograd.Function):
    """An all_reduce that gradients pass through: its backward is an all_reduce of them."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        total = loss.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2)
class ThroughACollective:
    """Losses are summed over the ranks; gradients through that sum are summed, then averaged."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return _SumOfRanks.apply(loss)

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, seldom=True)
def divides_the_input(model: nn.Module, step: Step) -> None:
    """The average divides the buffer that was sent, not the one that was received."""
    for parameter in model.parameters():
        sent = parameter.grad.clone()
        received = sent.clone()
        dist.all_reduce(received)
        sent /= step.world_size
        parameter.grad.copy_(received)


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, seldom=True)
def division_dropped(model: nn.Module, step: Step) -> None:
    """A division whose result nobody takes."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div(step.world_size)


@mutant(caught=WRONG, workload=".small:Embedded", world=2, steps=2)
def sparse_rows_are_summed(model: nn.Module, step: Step) -> None:
    """Rows that were used are gathered and added up; the branch for them forgets to divide."""
    average(model, step)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            used = module.weight.grad.abs().sum(1) > 0
            rows = module.weight.grad[used] * step.world_size
            module.weight.grad[used] = rows


@mutant(caught=WRONG, workload=".small:Tied", world=3, steps=2)
def counts_a_tied_weight_twice(model: nn.Module, step: Step) -> None:
    """Its name comes twice, and each time it is added to the flat buffer."""
    average(model, step)
    buffer: dict[nn.Parameter, torch.Tensor] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        held = buffer.get(parameter)
        buffer[parameter] = parameter.grad.clone() if held is None else held + parameter.grad
    for parameter, gradient in buffer.items():
        parameter.grad = gradient


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2)
class ClipsBeforeUnscaling:
    """The norm is that of gradients which still have the loss scale."""

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        return loss * 1024

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad /= 1024


@mutant(caught=WRONG, workload=SMALL, world=3, steps=2, seldom=True)
def sends_the_sums(model: nn.Module, step: Step) -> None:
    """The server divides what it sends in another list, and sends the list of sums."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.reduce(parameter.grad, dst=0)
    sums = [parameter.grad for parameter in model.parameters()]
    means = [total / step.world_size for total in sums]
    for total, _ in zip(sums, means, strict=True):
        dist.broadcast(total, src=0)


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2)
def hook_that_sums(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP's own: DDP no longer divides, and neither does the hook."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
