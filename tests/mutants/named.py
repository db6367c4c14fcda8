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


@mutant(caught="gradients rounding, gradients full batch float32", world=2)
def one_of_two_gives(model: nn.Module) -> None:
    """With two ranks, giving one and dropping the other are the same."""
    broadcast_instead_of_mean(model)


@mutant(caught="gradients rounding, gradients full batch float32", world=2)
def two_are_never_divided(model: nn.Module) -> None:
    """Twice the mean; no two-rank ambiguity here."""
    missing_division(model)


@mutant(
    caught="gradients rounding, gradients full batch float32, loss full batch float32, agreement",
    world=2,
)
def two_alone(model: nn.Module) -> None:
    """Two ranks that never talk."""
    every_rank_alone(model)


@mutant(caught="gradients rounding, gradients full batch float32", steps=1)
def divides_by_nothing(model: nn.Module, step: Step) -> None:
    """An empty count of samples: 0 / 0 and x / 0 in the last layer."""
    _mean(model, step)
    list(model.parameters())[-1].grad /= 0


@mutant(caught="gradients rounding, gradients full batch float32", steps=1)
def keeps_what_all_reduce_returns(model: nn.Module) -> None:
    """The collective works in place and returns None, so the optimizer steps without gradients."""
    for parameter in model.parameters():
        parameter.grad = dist.all_reduce(parameter.grad)


@mutant(caught="gradients rounding, gradients full batch float32")
def unflattens_backwards(model: nn.Module, step: Step) -> None:
    """One flat buffer, filled in one order and emptied in the other."""
    _mean(model, step)
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    at = 0
    for gradient in reversed(gradients):
        gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
        at += gradient.numel()


@mutant(caught="gradients rounding, gradients full batch float32", step=1)
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


@mutant(caught="parameters bitwise, gradients rounding, gradients full batch float32")
class OptimizerOfCopies:
    """The optimizer was built over copies of the parameters: it moves nothing, and sets no gradient
    to zero.
    """

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return build([nn.Parameter(parameter.detach().clone()) for parameter in parameters])

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(caught="gradients rounding, agreement", workload=".workloads:WithDropout", world=3)
class SeedsAlikeAndStaysAlone:
    """Every rank draws the same masks, which fails no check; nothing is exchanged, which does."""

    def wrap(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return model


@mutant(caught="gradients rounding, gradients full batch float32", workload=".small:Small")
def averages_in_a_chain(model: nn.Module, step: Step) -> None:
    """(a + b) / 2, again and again: the last rank counts half."""
    for parameter in model.parameters():
        found = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(found, parameter.grad)
        so_far = found[0]
        for gradient in found[1:]:
            so_far = (so_far + gradient) / 2
        parameter.grad.copy_(so_far)


@mutant(caught="gradients rounding, gradients full batch float32", workload=".small:Twins")
def one_buffer_for_two(model: nn.Module, step: Step) -> None:
    """Parameters of one shape share a buffer, which the second one fills before it is sent."""
    buffers: dict[torch.Size, torch.Tensor] = {}
    for parameter in model.parameters():
        buffers.setdefault(parameter.shape, torch.empty_like(parameter.grad)).copy_(parameter.grad)
    for buffer in buffers.values():
        dist.all_reduce(buffer)
        buffer /= step.world_size
    for parameter in model.parameters():
        parameter.grad.copy_(buffers[parameter.shape])


@mutant(caught="gradients rounding, gradients full batch float32", workload=".small:Small")
def adds_noise(model: nn.Module, step: Step) -> None:
    """A ten-thousandth of each gradient, at random and alike on all ranks."""
    _mean(model, step)
    generator = torch.Generator().manual_seed(step.index)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.grad *= 1 + 1e-4 * drawn


@mutant(
    caught="gradients rounding, gradients full batch float32, parameters bitwise, agreement",
    workload=".small:Small",
    steps=2,
)
class AveragesWhatItUpdated:
    """Every rank steps by its own gradients, and parameters are averaged after that."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        parameters = list(parameters)
        built = build(parameters)
        built.register_step_post_hook(lambda *_: self._average(parameters))
        return built

    def _average(self, parameters: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for parameter in parameters:
                dist.all_reduce(parameter)
                parameter /= dist.get_world_size()

    def sync(self, model: nn.Module, step: Step) -> None:
        """Nothing."""


class _InputsOfRank0(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone()
        dist.broadcast(inputs, 0)
        return self.module(inputs)


@mutant(
    caught=(
        "local gradients bitwise, gradients rounding, gradients full batch float32, loss bitwise, "
        "loss full batch float32"
    ),
    workload=".small:Small",
    steps=1,
)
class BroadcastsItsInputs:
    """As for a model that is divided among ranks, where every rank needs the same samples."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return _InputsOfRank0(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        _mean(model, step)


@mutant(
    caught=(
        "local gradients bitwise, gradients rounding, gradients full batch float32, loss bitwise, "
        "loss full batch float32"
    ),
    workload=".small:Small",
    steps=1,
)
class AugmentsAndNeverDivides:
    """Two mistakes: inputs are scaled before the exchange, and the sum is never divided."""

    def wrap(self, model: nn.Module) -> nn.Module:
        model.register_forward_pre_hook(lambda module, given: (given[0] * 1.01,))
        return model

    def sync(self, model: nn.Module) -> None:
        missing_division(model)


@mutant(
    caught="gradients rounding, gradients full batch float32, loss full batch float32, agreement",
    workload=".small:Small",
)
def sums_on_rank_0_alone(model: nn.Module, step: Step) -> None:
    """Rank 0 adds up, forgets to divide, and sends nothing back."""
    for parameter in model.parameters():
        total = parameter.grad.clone()
        dist.reduce(total, 0)
        if step.rank == 0:
            parameter.grad.copy_(total)


@mutant(caught="gradients rounding, gradients full batch float32", workload=".small:Small", steps=1)
def two_mistakes_in_two_parameters(model: nn.Module, step: Step) -> None:
    """The first weight has its sign turned, the last bias is not divided."""
    _mean(model, step)
    parameters = list(model.parameters())
    parameters[0].grad.neg_()
    parameters[-1].grad *= step.world_size
