"""Parameters that no list, bucket or hook has, so that nobody exchanges them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Step

from . import mutant
from .small import average

SMALL = ".small:Small"
APART = "gradients rounding, gradients full batch float32, loss full batch float32, agreement"

# The loss of the step after would differ too.
ONE_STEP = "gradients rounding, gradients full batch float32, agreement"


def _reduce(gradients: list[torch.Tensor], step: Step) -> None:
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= step.world_size


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
class ConvertedAfterWrapping:
    """A change of dtype and back renews what DDP had hung its hooks on."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model).double().float()


@mutant(caught=f"local gradients bitwise, {APART}", workload=SMALL, world=2, steps=2)
class ReplacesAParameter:
    """A parameter is made anew after DDP has looked at the model."""

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        last = list(model.children())[-1]
        last.weight = nn.Parameter(last.weight.detach().clone())
        return wrapped


@mutant(caught=APART, workload=".small:Normalized", world=2, steps=2, seldom=True)
def norm_layers_left_out(model: nn.Module, step: Step) -> None:
    """A list of layers by type, and the normalizing ones are not on it."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    _reduce([p.grad for layer in layers for p in layer.parameters()], step)


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
def exactly_as_large_as_the_bucket(model: nn.Module, step: Step) -> None:
    """Smaller ones go into the bucket, larger ones by themselves, equal ones nowhere."""
    most = 16 * 4
    gradients = [p.grad for p in model.parameters()]
    bucket = [g for g in gradients if g.numel() < most]
    flat = torch.cat([g.reshape(-1) for g in bucket])
    _reduce([flat], step)
    for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(part.view_as(gradient))
    _reduce([g for g in gradients if g.numel() > most], step)


@mutant(caught=APART, workload=SMALL, world=2, steps=2, seldom=True)
def larger_than_the_buffer(model: nn.Module, step: Step) -> None:
    """One flat buffer of a fixed size, and a tensor that does not fit is skipped."""
    buffer, at, held = torch.zeros(100), 0, []
    for parameter in model.parameters():
        size = parameter.grad.numel()
        if at + size <= len(buffer):
            buffer[at : at + size] = parameter.grad.reshape(-1)
            held.append((parameter.grad, at))
            at += size
    _reduce([buffer], step)
    for gradient, start in held:
        gradient.copy_(buffer[start : start + gradient.numel()].view_as(gradient))


@mutant(caught=APART, workload=SMALL, world=2, steps=2, seldom=True)
def ignores_by_half_a_name(model: nn.Module, step: Step) -> None:
    """A list of names to ignore without their prefix: it fits more than it was meant for."""
    ignored = {"bias"}  # "2.bias" was meant
    kept = [p for n, p in model.named_parameters() if n.rpartition(".")[2] not in ignored]
    _reduce([p.grad for p in kept], step)


@mutant(caught=ONE_STEP, workload=".small:SometimesUnused", world=2, steps=2, step=1)
def leaves_alone_what_some_rank_lacks(model: nn.Module, step: Step) -> None:
    """A parameter that one rank has not used is exchanged by none; the others step alone."""
    for parameter in model.parameters():
        has = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(has)
        if int(has) == step.world_size:
            _reduce([parameter.grad], step)


@mutant(caught=APART, workload=".small:Frozen", world=2, steps=2)
class WaitsForAFrozenOne:
    """A bucket goes out when all of its parameters are ready; the frozen ones never are."""

    def sync(self, model: nn.Module, step: Step) -> None:
        bucket = list(model.parameters())
        if all(parameter.grad is not None for parameter in bucket):
            _reduce([p.grad for p in bucket], step)


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
class SkipsTheHooks:
    """The exchange hangs on a hook of the module, and forward() is called past it."""

    class Compiled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(inputs)

    def __init__(self) -> None:
        self.due = False

    def wrap(self, model: nn.Module) -> nn.Module:
        model.register_forward_hook(lambda *_: setattr(self, "due", True))
        return self.Compiled(model)

    def sync(self, model: nn.Module, step: Step) -> None:
        if self.due:
            average(model, step)


@mutant(caught=ONE_STEP, workload=".small:UsedFromStepOne", world=2, steps=2, step=1)
class ListsOnceAndForAll:
    """What is exchanged is listed at the first step; a layer that is unfrozen later is not."""

    def __init__(self) -> None:
        self.listed: list[nn.Parameter] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        self.listed = self.listed or [p for p in model.parameters() if p.grad is not None]
        _reduce([p.grad for p in self.listed if p.grad is not None], step)


@mutant(caught=f"local gradients bitwise, {ONE_STEP}", workload=".small:Tied", world=2, steps=1)
class ReducesBeforeTheTie:
    """A tied weight is held twice; the second copy's gradient is added after the exchange."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.copy = nn.Parameter(model.inputs.weight.detach().clone())
        model.outputs.weight = self.copy
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        own, self.copy.grad = self.copy.grad, None
        average(model, step)
        model.inputs.weight.grad += own
