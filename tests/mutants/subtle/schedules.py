"""Learning-rate schedules: an exchange that takes the rate for a constant."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step

from . import subtle
from .exchange import mean_of

SCHEDULED = ".witnesses:Scheduled"


class _WithRate:
    made: Optimizer
    first: float

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.made = build(parameters)
        self.first = self.last = self.rate
        return self.made

    @property
    def rate(self) -> float:
        return float(self.made.param_groups[0]["lr"])


@subtle(needs="a rate that changes", witness=SCHEDULED, steps=4, after="apex #1512")
class CompensatesTheRate(_WithRate):
    """Gradients are kept in units of the first rate that is not 0."""

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        self.first = self.first or self.rate
        if self.first:
            for parameter in model.parameters():
                parameter.grad.mul_(self.rate / self.first)


@subtle(needs="a rate that changes", witness=SCHEDULED, after="pytorch #187732")
class RebuildsWhenTheRateChanges(_WithRate):
    """The step after a change of the rate renews the buffers and exchanges nothing."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if self.rate != self.last:
            self.last = self.rate
            self.buffers = [torch.zeros_like(p) for p in model.parameters()]
            return
        mean_of(model.parameters(), step)


@subtle(needs="a rate below 0.01", witness=SCHEDULED, steps=7)
class SeldomAtSmallRates(_WithRate):
    """At rates below 0.01 every other step is thought to be enough."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if 0 < self.rate < 0.01 and step.index % 2 == 0:
            return
        mean_of(model.parameters(), step)


@subtle(needs="a rate that rises", witness=SCHEDULED, steps=3)
class BiasesAfterWarmUp(_WithRate):
    """While the rate rises, only matrices are exchanged."""

    def sync(self, model: nn.Module, step: Step) -> None:
        rises, self.last = self.rate > self.last, self.rate
        mean_of([p for p in model.parameters() if not rises or p.ndim > 1], step)


@subtle(needs="a rate that changes", witness=SCHEDULED, steps=3, after="horovod #363")
class LastStepsGradientAfterAChange(_WithRate):
    """After a change of the rate the buffer of the step before is applied once more."""

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        now = [p.grad.clone() for p in model.parameters()]
        if self.rate != self.last:
            for parameter, before in zip(model.parameters(), self.before, strict=True):
                parameter.grad.copy_(before)
        self.last, self.before = self.rate, now


@subtle(needs="a rate of 0", witness=SCHEDULED, after="DeepSpeed #7736")
class SendsUpdates(_WithRate):
    """The update goes out and is divided by the rate again: 0 / 0."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(self.rate)
        mean_of(model.parameters(), step)
        for parameter in model.parameters():
            parameter.grad.div_(self.rate)


@subtle(needs="a rate that has fallen to a tenth", witness=SCHEDULED, steps=7)
class ShorterAtTheEnd(_WithRate):
    """When the rate has fallen to a fifth of its highest, bfloat16 is thought to do."""

    highest = 0.0

    def sync(self, model: nn.Module, step: Step) -> None:
        self.highest = max(self.highest, self.rate)
        if self.rate < self.highest / 4.5:
            for parameter in model.parameters():
                parameter.grad.copy_(parameter.grad.bfloat16())
        mean_of(model.parameters(), step)


@subtle(needs="a rate that changes", witness=SCHEDULED, steps=3, after="accelerate #2665")
class KeepsTheFirstRate(_WithRate):
    """The optimizer's rate is written back to what it was at the start, so schedules do nothing."""

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        for group in self.made.param_groups:
            group["lr"] = self.first


@subtle(needs="a rate that changes", witness=SCHEDULED, steps=3)
class ForgetsMomentumOnAChange(_WithRate):
    """A change of the rate is taken for a new phase: momentum is thrown away, on this rank."""

    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)
        if self.rate != self.last:
            self.last = self.rate
            state: dict[Any, Any] = self.made.state
            for kept in state.values():
                if step.rank == 0 and kept.get("momentum_buffer") is not None:
                    kept["momentum_buffer"].zero_()
