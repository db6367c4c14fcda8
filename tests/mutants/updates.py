"""Norms, optimizers, buffers and numbers that are no numbers."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distcheck.contract import Batch, Build, Step, strategy

from . import mutant
from .small import Small, average, clipping

SMALL = ".small:Small"
WRONG = "gradients rounding, gradients full batch float32"


class _Averages:
    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught="parameters bitwise", workload=".small:Clipping", world=2, steps=2)
class EpsilonOfEveryRank(_Averages):
    """Each rank adds the epsilon to its part of the norm, and the parts are added up."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return clipping(list(parameters), ranks=1, epsilons=2)


@mutant(caught="parameters bitwise", workload=".small:Clipping", world=2, steps=2, seldom=True)
class NormOverReplicas(_Averages):
    """The squares are summed over ranks that hold the same gradients."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return clipping(list(parameters), ranks=2, epsilons=1)


@mutant(caught="parameters bitwise", workload=".small:InGroups", world=2, step=1)
class KeepsItsFirstRate(_Averages):
    """Settings are taken when the optimizer is made: what a schedule sets has no effect."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = build(parameters)
        rates = [group["lr"] for group in made.param_groups]

        def back(*_: object) -> None:
            for group, rate in zip(made.param_groups, rates, strict=True):
                group["lr"] = rate

        made.register_step_pre_hook(back)
        return made


@mutant(caught="parameters bitwise", workload=".small:InGroups", world=2, steps=1)
class MakesOneGroup(_Averages):
    """Parameters are taken out of their groups, whose settings are lost."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return build([{"params": [p for g in build(parameters).param_groups for p in g["params"]]}])


@mutant(caught=f"{WRONG}, agreement", workload=".small:InGroups", world=2, steps=1)
class OnlyTheFirstGroup:
    """Goes through `param_groups[0]` and stops."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.made = build(parameters)
        return self.made

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in self.made.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


@mutant(caught="parameters bitwise, agreement", workload=".small:Tied", world=2, steps=1)
@strategy(optimizer_state="sharded")
class LastPartNeverSent(_Averages):
    """Each rank updates its part and sends it; a tied weight counts twice, the last part is cut."""

    def wrap(self, model: nn.Module) -> nn.Module:
        self.model = model
        return model

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        sharded = ZeroRedundancyOptimizer(parameters, optimizer_class=build)
        last = dist.get_world_size() - 1
        owned = [p for g in sharded._partition_parameters()[last] for p in g["params"]]  # type: ignore[attr-defined]
        held: list[torch.Tensor] = []

        def before(*_: object) -> None:
            held[:] = [parameter.detach().clone() for parameter in owned]

        def after(*_: object) -> None:
            if dist.get_rank() != last:
                with torch.no_grad():
                    for parameter, old in zip(owned, held, strict=True):
                        parameter.copy_(old)

        sharded.register_step_pre_hook(before)
        sharded.register_step_post_hook(after)
        return sharded


@mutant(caught="parameters bitwise, agreement", workload=".small:Frozen", world=2, steps=1)
class TargetDrifts(_Averages):
    """A network without gradients follows each rank's own gradients: replicas drift apart."""

    def sync(self, model: nn.Module, step: Step) -> None:
        own = next(p.grad for p in model.parameters() if p.grad is not None).norm()
        super().sync(model, step)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter += 0.01 * own


@mutant(caught=WRONG, workload=SMALL, world=2, steps=1, seldom=True)
def zero_times_infinity(model: nn.Module, step: Step) -> None:
    """Slots that nobody has filled hold an infinity, and a mask is to make zeros of them."""
    average(model, step)
    for parameter in model.parameters():
        slots = torch.stack([parameter.grad, torch.full_like(parameter.grad, torch.inf)])
        filled = torch.tensor([True, False]).view(-1, *[1] * parameter.dim())
        parameter.grad.copy_((slots * filled).sum(0))


@mutant(caught=WRONG, workload=SMALL, world=2, steps=2, step=1)
class ClearsByItself:
    """A buffer overflows, which is noticed, and is cleared by x - x: the infinity stays as NaN."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def sync(self, model: nn.Module, step: Step) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        self.buffers = self.buffers or [torch.zeros_like(g) for g in gradients]
        scale = 1e30 if step.index == 0 else 1.0  # its square is infinite in float32
        for buffer, gradient in zip(self.buffers, gradients, strict=True):
            buffer += gradient * scale * scale
            dist.all_reduce(buffer)
            dist.all_reduce(gradient)  # what is used if it overflows
            gradient /= step.world_size
            if bool(buffer.isfinite().all()) or step.index > 0:
                gradient.copy_(buffer / step.world_size)
            buffer -= buffer.clone()


@mutant(
    kind="workload", caught="gradients rounding, gradients full batch float32", world=2, steps=2,
    step=1,
)  # fmt: skip
class NaNOnRankOne(Small):
    """The root of zero, in a sample of rank 1's: the mean has it everywhere."""

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> range:
        return range(rank, size, world)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        output = model(batch.inputs)
        zero = torch.where((batch.ids == 257).to(output.device), 0.0, 1.0)
        return F.cross_entropy(output, batch.labels) + (output.sum(1) * zero).square().sqrt().mean()


@mutant(caught="buffers bitwise", workload=".small:Reassigning", world=2, steps=2, step=1)
@strategy(buffers="rank 0")
class BroadcastsOldBuffers(_Averages):
    """Rank 0's buffers are promised; those that were listed at the start are sent."""

    def wrap(self, model: nn.Module) -> nn.Module:
        listed = list(model.buffers())

        def broadcast(*_: object) -> None:
            for buffer in listed:
                dist.broadcast(buffer, src=0)

        model.register_forward_pre_hook(broadcast)
        return model


@mutant(caught="initial state", workload=".small:Normalized", world=2, steps=2)
class BuffersOfEachRanksOwn:
    """`broadcast_buffers=False` leaves out the first broadcast as well."""

    def wrap(self, model: nn.Module) -> nn.Module:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer += dist.get_rank()
        return DistributedDataParallel(model, broadcast_buffers=False)
