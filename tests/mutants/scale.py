"""The sum is right, the scale is not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import BackendAllReduce, DDPBuckets, Step, strategy
from tests.mutants import mutant


@mutant(caught="gradients R, gradients S32")
def missing_division(model: nn.Module) -> None:
    """SUM without a division: W times too large; the loss curve looks fine."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@mutant(caught="gradients R, gradients S32")
def double_division(model: nn.Module, step: Step) -> None:
    """Divides before and after."""
    for parameter in model.parameters():
        parameter.grad /= step.world_size
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="gradients R, gradients S32", world=3)
def wrong_divisor(model: nn.Module, step: Step) -> None:
    """Divides by another group's size (DeepSpeed #5555)."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


@mutant(caught="gradients R")
def scale_off_by_two_millionths(model: nn.Module, step: Step) -> None:
    """So small that only the rounding bound sees it."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad *= (1 + 2e-6) / step.world_size


@mutant(caught="gradients X", world=3)
@strategy(order=BackendAllReduce(), scale="divide-after")
def multiplies_by_the_reciprocal(model: nn.Module, step: Step) -> None:
    """Promises a division and multiplies by 1/3: within any bound, not to the bit."""
    for parameter in model.parameters():
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad *= 1 / step.world_size


@mutant(caught="gradients R, gradients S32", world=3)
def mean_of_means(model: nn.Module, step: Step) -> None:
    """Shards of 86, 85 and 85 samples count alike (pytorch #37359, transformers #608)."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught="gradients X, gradients R, gradients S32, local gradients X", world=3)
@strategy(
    order=DDPBuckets(),
    scale="multiply-before",
    weighting="loss",
    sync="during-backward",
    buffers="rank 0",
)
class DDPWithoutWeights:
    """DDP as everybody writes it, on a batch that does not divide by the world."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


@mutant(caught="gradients R, gradients S32")
def one_parameter_twice(model: nn.Module, step: Step) -> None:
    """One parameter group is scaled twice (DeepSpeed #4957)."""
    for index, parameter in enumerate(model.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size
        if index == 2:
            parameter.grad /= step.world_size


@mutant(caught="gradients lattice, parameters lattice", workload="lattice")
def forgets_scalars(model: nn.Module, step: Step) -> None:
    """A parameter without dimensions is summed and never divided; only the lattice has one."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if parameter.dim() > 0:
            parameter.grad /= step.world_size


@mutant(caught="gradients R, gradients S32")
def half_precision_wire(model: nn.Module, step: Step) -> None:
    """Compressed to bfloat16 on the way, without saying so."""
    for parameter in model.parameters():
        small = parameter.grad.to(torch.bfloat16)
        dist.all_reduce(small)
        parameter.grad.copy_(small / step.world_size)


@mutant(caught="gradients S64", dtype=None)
def single_precision_wire(model: nn.Module, step: Step) -> None:
    """Exact for float32, lossy for float64: only the float64 pass sees it."""
    for parameter in model.parameters():
        wire = parameter.grad.float()
        dist.all_reduce(wire)
        parameter.grad.copy_(wire / step.world_size)


@mutant(caught="local gradients X")
class DoubledOnTheWay:
    """Gradients are doubled inside backward and halved after: right in the end, not on the way."""

    def wrap(self, model: nn.Module) -> nn.Module:
        # The same values, with twice the derivative.
        model.register_forward_hook(lambda module, inputs, output: output * 2 - output.detach())
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2 * step.world_size
