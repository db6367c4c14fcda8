"""Several backward passes in a step, and what is lost, counted twice or sent too early."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Batch, LossOf, Step, strategy

from . import mutant
from .small import average

SMALL = ".small:Small"


class _Accumulates:
    """Right so far: two stretches, each by its share of the shard; then the mean over the ranks."""

    model: nn.Module

    def wrap(self, model: nn.Module) -> nn.Module:
        self.model = model
        return model

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        total = torch.zeros((), device=batch.inputs.device)
        for number, part in enumerate(batch.split(2)):
            share = len(part.ids) / step.samples
            self.before(number, step)
            loss = loss_of(part) * share
            loss.backward()
            self.after(number, step)
            total += loss.detach()
        return total

    def before(self, number: int, step: Step) -> None:
        """Before the forward pass of stretch `number`."""

    def after(self, number: int, step: Step) -> None:
        """After its backward pass."""

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)


@mutant(caught="gradients rounding, gradients full batch float32", workload=SMALL, world=3, steps=2)
@strategy(micro_batches=2)
class DividesByTheStepsTwice(_Accumulates):
    """The loss is divided by the number of accumulation steps, and then the gradient."""

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)
        for parameter in model.parameters():
            parameter.grad /= 2


@mutant(
    caught="local gradients bitwise, gradients rounding, gradients full batch float32",
    workload=SMALL, world=2, steps=2,
)  # fmt: skip
@strategy(micro_batches=2)
class RescalesEveryTime(_Accumulates):
    """What has been accumulated is divided at every stretch: a moving average."""

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        losses = []
        for part in batch.split(2):
            loss = loss_of(part)
            loss.backward()
            losses.append(loss.detach())
            for parameter in self.model.parameters():
                parameter.grad /= 2
        return (losses[0] + losses[1]) / 2


@mutant(
    caught="gradients rounding, gradients full batch float32, loss full batch float32, agreement",
    workload=SMALL, world=2, steps=2,
)  # fmt: skip
@strategy(micro_batches=2)
class AddsTheLastAfterTheSync(_Accumulates):
    """The exchange comes before the last stretch's gradients do."""

    def after(self, number: int, step: Step) -> None:
        if number == 0:
            average(self.model, step)

    def sync(self, model: nn.Module, step: Step) -> None:
        """It was done on the way."""


@mutant(caught="gradients rounding, gradients full batch float32", workload=SMALL, world=2, steps=2)
@strategy(micro_batches=2)
class KeepsTheFirstOnly(_Accumulates):
    """The partition that is reduced was filled at the first stretch; later ones are dropped."""

    def after(self, number: int, step: Step) -> None:
        if number == 0:
            self.partition = [p.grad.clone() for p in self.model.parameters()]
        else:
            for parameter, kept in zip(self.model.parameters(), self.partition, strict=True):
                parameter.grad.copy_(kept)


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=SMALL, world=2, steps=2,
    seldom=True,
)  # fmt: skip
@strategy(micro_batches=2)
class KeepsTheLastOnly(_Accumulates):
    """Each backward pass overwrites the buffer that it should add to."""

    def before(self, number: int, step: Step) -> None:
        self.earlier = [p.grad for p in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.grad = None


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=SMALL, world=2, steps=2,
    seldom=True,
)  # fmt: skip
@strategy(micro_batches=2)
class SetsToZeroEveryTime(_Accumulates):
    """zero_grad stands in the inner loop."""

    def before(self, number: int, step: Step) -> None:
        self.model.zero_grad(set_to_none=False)


class _AddsUp(_Accumulates):
    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        losses = [loss_of(part) for part in batch.split(2)]
        for loss in losses:
            loss.backward()
        return (losses[0].detach() + losses[1].detach()) / 2


@mutant(
    caught="local gradients bitwise, gradients rounding, gradients full batch float32",
    workload=SMALL, world=4, steps=2,
)  # fmt: skip
@strategy(micro_batches=2)
class TwoReplicasInEachProcess(_AddsUp):
    """Every process sums over two replicas, and the sum is divided by the processes alone."""


@mutant(
    caught="local gradients bitwise, gradients rounding, gradients full batch float32",
    workload=SMALL,
    steps=2,
)
class AddsUpMeanLosses(_AddsUp):
    """Mean losses are added up, as if `accumulate` had divided them; nothing is promised."""


@mutant(
    caught="local gradients bitwise, gradients rounding, gradients full batch float32",
    workload=SMALL,
    steps=2,
)
class UnpromisedAndALittleOff(_Accumulates):
    """Promises nothing, so bits may differ; a ten-thousandth is more than they may."""

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        return super().backward(lambda part: loss_of(part) * 1.0001, batch, step) / 1.0001


@mutant(caught="buffers bitwise", workload=".small:Normalized", world=2, steps=2)
@strategy(micro_batches=2, buffers="rank 0")
class BroadcastsBuffersBetween(_Accumulates):
    """Buffers are sent before every stretch, where once before the step was promised."""

    def before(self, number: int, step: Step) -> None:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)


class _Noting(torch.autograd.Function):
    """Passes a weight on, and notes the mean of what comes back: of one call only."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, noted: dict[str, torch.Tensor]) -> torch.Tensor:
        ctx.noted = noted
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        mean = gradient.clone()
        dist.all_reduce(mean)
        ctx.noted["mean"] = mean / dist.get_world_size()
        return gradient, None


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=".small:ModelCalledTwice",
    world=2, steps=2,
)  # fmt: skip
class KeepsOneCallOnly:
    """A module that is called twice is reduced twice, and the second result replaces the first."""

    def __init__(self) -> None:
        self.noted: dict[str, torch.Tensor] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        layer = model.shared
        layer.forward = lambda inputs: nn.functional.linear(
            inputs, _Noting.apply(layer.weight, self.noted), layer.bias
        )
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        average(model, step)
        model.shared.weight.grad.copy_(self.noted["mean"])
