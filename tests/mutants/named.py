"""Mutants whose point is what they are called: causes that no other has, and small worlds."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step

from . import mutant
from .missing_sync import broadcast_instead_of_mean
from .missing_sync import no_sync as every_rank_alone
from .scale import missing_division


def _mean(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="gradients R, gradients S32", world=2)
def one_of_two_gives(model: nn.Module) -> None:
    """With two ranks, giving one and dropping the other are the same."""
    broadcast_instead_of_mean(model)


@mutant(caught="gradients R, gradients S32", world=2)
def two_are_never_divided(model: nn.Module) -> None:
    """Twice the mean; no two-rank ambiguity here."""
    missing_division(model)


@mutant(caught="gradients R, gradients S32, loss S32, agreement", world=2)
def two_alone(model: nn.Module) -> None:
    """Two ranks that never talk."""
    every_rank_alone(model)


@mutant(caught="gradients R, gradients S32", steps=1)
def divides_by_nothing(model: nn.Module, step: Step) -> None:
    """An empty count of samples: 0 / 0 and x / 0 in the last layer."""
    _mean(model, step)
    list(model.parameters())[-1].grad /= 0


@mutant(caught="gradients R, gradients S32")
def unflattens_backwards(model: nn.Module, step: Step) -> None:
    """One flat buffer, filled in one order and emptied in the other."""
    _mean(model, step)
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    at = 0
    for gradient in reversed(gradients):
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


@mutant(caught="gradients R, gradients S32", step=1)
class NeverSetToZero:
    """Gradients are added to what was there, after the sync (zero_grad forgotten)."""

    def __init__(self) -> None:
        self.held: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)
        gradients = [parameter.grad for parameter in model.parameters()]
        for gradient, held in zip(gradients, self.held, strict=False):
            gradient += held
        self.held = [gradient.clone() for gradient in gradients]


@mutant(caught="parameters X, gradients R, gradients S32")
class OptimizerOfCopies:
    """The optimizer was built over copies of the parameters: it moves nothing, and sets no gradient
    to zero.
    """

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return build([nn.Parameter(parameter.detach().clone()) for parameter in parameters])

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="gradients R, agreement", workload=".workloads:WithDropout", world=3)
class SeedsAlikeAndStaysAlone:
    """Every rank draws the same masks, which fails no check; nothing is exchanged, which does."""

    def wrap(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return model
