"""Designs that lose something on purpose, are accepted as such, and are wrong beside that."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distcheck.contract import Build, Step

from . import mutant

_WRONG = "gradients rounding, gradients full batch float32"


def _through(wire: torch.dtype, model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        small = parameter.grad.to(wire)
        dist.all_reduce(small)
        parameter.grad.copy_(small * factor)


@mutant(caught=_WRONG, steps=1, accept="low-precision:bf16")
def rounded_and_never_divided(model: nn.Module) -> None:
    """bfloat16 is accepted, W times the mean is not."""
    _through(torch.bfloat16, model, 1.0)


@mutant(caught=_WRONG, steps=1, accept="low-precision:fp16", seldom=True)
def rounded_and_one_percent_off(model: nn.Module, step: Step) -> None:
    """float16 may lose a third of a percent in an element, not one in every element."""
    _through(torch.float16, model, 1.01 / step.world_size)


@mutant(caught="gradients rounding", steps=1, accept="low-precision:fp16")
def shorter_than_accepted(model: nn.Module, step: Step) -> None:
    """float16 was said, bfloat16 is sent."""
    _through(torch.bfloat16, model, 1.0 / step.world_size)


def _quantized(model: nn.Module, bits: int, factor: float, *, ranks: int | None = None) -> None:
    """Symmetric, one range a tensor; `ranks` leaves the last ones out."""
    for parameter in model.parameters():
        gradient = parameter.grad
        quantum = gradient.abs().max() / (2 ** (bits - 1) - 1)
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, (gradient / quantum).round() * quantum)
        parameter.grad.copy_(sum(everyone[:ranks]) * factor)


@mutant(caught=_WRONG, steps=1, accept="quantized:8")
def quantized_and_never_divided(model: nn.Module) -> None:
    """Eight bits are accepted, W times the mean is not."""
    _quantized(model, 8, 1.0)


@mutant(caught=_WRONG, steps=1, accept="quantized:8", seldom=True)
def quantized_without_the_last_rank(model: nn.Module, step: Step) -> None:
    """A loop over the gathered list that ends too early."""
    _quantized(model, 8, 1 / (step.world_size - 1), ranks=-1)


@mutant(caught=_WRONG, steps=1, accept="quantized:12")
def quantized_and_one_percent_off(model: nn.Module, step: Step) -> None:
    """Twelve bits are finer than a hundredth of the large elements."""
    _quantized(model, 12, 1.01 / step.world_size)


@mutant(caught=_WRONG, steps=1, accept="quantized:8")
def fewer_bits_than_accepted(model: nn.Module, step: Step) -> None:
    """Eight were said, five are sent."""
    _quantized(model, 5, 1 / step.world_size)


class _LowRank:
    """Two directions of every matrix, and what is left over is carried on."""

    directions = 2
    factor = 1.0  # of the mean

    def __init__(self) -> None:
        self.left: dict[int, torch.Tensor] = {}

    def sync(self, model: nn.Module, step: Step) -> None:
        for index, parameter in enumerate(model.parameters()):
            gradient = parameter.grad
            if gradient.dim() < 2:
                dist.all_reduce(gradient)
                gradient *= self.factor / step.world_size
                continue
            matrix = gradient.reshape(gradient.shape[0], -1) + self.left.get(index, 0.0)
            generator = torch.Generator().manual_seed(step.index)
            tried = torch.randn(matrix.shape[1], self.directions, generator=generator)
            along = matrix @ tried
            dist.all_reduce(along)
            along = self.basis(along)
            share = self.share(matrix.T @ along, step)
            dist.all_reduce(share)
            sent = along @ (share * (self.factor / step.world_size)).T
            self.left[index] = self.leftover(matrix, sent)
            gradient.copy_(sent.view_as(gradient))

    def basis(self, along: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(along).Q

    def share(self, share: torch.Tensor, step: Step) -> torch.Tensor:
        return share

    def leftover(self, matrix: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return matrix - sent


@mutant(caught="gradients rounding", steps=1, accept="low-rank:2")
class LowRankAndNeverDivided(_LowRank):
    """The second product is summed, and nobody divides it."""

    factor = 4.0


@mutant(caught="gradients rounding", steps=1, accept="low-rank:2", seldom=True)
class LowRankAndOnePercentOff(_LowRank):
    """Directions are the strategy's own affair, lengths are not."""

    factor = 1.01


@mutant(caught="gradients rounding", steps=1, accept="low-rank:2", seldom=True)
class LowRankWithoutTheLastRank(_LowRank):
    """The last rank's product never gets into the sum."""

    def share(self, share: torch.Tensor, step: Step) -> torch.Tensor:
        return share * (step.rank < step.world_size - 1)


@mutant(caught="gradients rounding", steps=1, accept="low-rank:2")
class LowRankNeverOrthogonal(_LowRank):
    """Columns of length one, and not at right angles."""

    def basis(self, along: torch.Tensor) -> torch.Tensor:
        return along / along.norm(dim=0)


@mutant(caught="gradients rounding", steps=2, accept="low-rank:2", step=1)
class LowRankForgetsTheRest(_LowRank):
    """What was left over is set to zero instead of being carried on."""

    def leftover(self, matrix: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(matrix)


@mutant(caught="gradients rounding", steps=1, accept="low-rank:1", seldom=True)
class MoreDirectionsThanAccepted(_LowRank):
    """One was said, two are sent."""


class _Averaging(Optimizer):
    """torch's optimizer, and the mean of all parameters after steps 1, 3, 5."""

    def __init__(self, inner: Optimizer, **how: float) -> None:
        self.optim, self._how, self._taken = inner, how, 0
        super().__init__(inner.param_groups, {})

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:  # type: ignore[override]
        self.optim.step()
        self._taken += 1
        if self._taken % self._how.get("period", 2):
            return
        world = dist.get_world_size()
        for index, parameter in enumerate(p for g in self.param_groups for p in g["params"]):
            if index >= self._how.get("most", 99):
                break
            data = parameter.data
            gone = dist.get_rank() >= self._how.get("ranks", world)
            total = torch.zeros_like(data) if gone else data.clone()
            dist.all_reduce(total)
            data.copy_(total * (self._how.get("factor", 1.0) / self._how.get("ranks", world)))


class _Local:
    """Nothing is exchanged after backward."""

    how: Mapping[str, float] = MappingProxyType({})

    def sync(self, model: nn.Module) -> None:
        """Nothing."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return _Averaging(build(parameters), **self.how)


@mutant(caught="parameters rounding, agreement", accept="local-sgd:2", world=2, steps=4, step=1)
class NeverAverages(_Local):
    """Local SGD whose second half was forgotten."""

    how = MappingProxyType({"period": 99})


@mutant(caught="parameters rounding", accept="local-sgd:2", steps=4, step=1)
class AveragesAndNeverDivides(_Local):
    """The sum of the parameters."""

    how = MappingProxyType({"factor": 4.0})


@mutant(caught="parameters rounding", accept="local-sgd:2", steps=4, step=1, seldom=True)
class AveragesWithoutTheLastRank(_Local):
    """The mean of all ranks but the last."""

    how = MappingProxyType({"ranks": 3})


@mutant(
    caught="parameters rounding, agreement", accept="local-sgd:2", world=2, steps=4, step=1,
    seldom=True,
)  # fmt: skip
class AveragesSomeParameters(_Local):
    """The first three of six."""

    how = MappingProxyType({"most": 3})


@mutant(caught="parameters bitwise", accept="local-sgd:2", world=2, steps=4, step=1)
class AveragesMoreOften(_Local):
    """Every step, where every second was said."""

    how = MappingProxyType({"period": 1})


class _Combining:
    """Around the optimizer: a step of its own, then `combine(step)`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps, self.param_groups = optimizer, 0, optimizer.param_groups
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        self.combine(self.steps)
        self.steps += 1

    def combine(self, step: int) -> None:
        """After a step."""

    def average(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)
        tensor /= self.world


@mutant(caught="parameters rounding, agreement", accept="local-sgd:2", world=2, steps=4, step=1)
class AveragesBeforeTheStep(_Combining):
    """The mean of the parameters is taken, and then each rank steps by its own gradient."""

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters if self.steps % 2 else ():
            self.average(parameter.data)
        super().step()


@mutant(
    caught="parameters rounding", accept="local-sgd:2:state=mean", world=2, steps=4, step=1,
    seldom=True,
)  # fmt: skip
class AveragesNoMomentum(_Combining):
    """The momentum was said to be averaged as well."""

    def combine(self, step: int) -> None:
        for parameter in self.parameters if step % 2 else ():
            self.average(parameter.data)


class _Outer(_Combining):
    """DiLoCo: two inner steps, then Nesterov momentum."""

    how = MappingProxyType({"lr": 0.7, "momentum": 0.9, "nesterov": True})

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.start = [p.detach().clone().requires_grad_() for p in self.parameters]
        self.outer = torch.optim.SGD(self.start, **self.how)

    def combine(self, step: int) -> None:
        if step % 2 == 0:
            return
        for start, parameter in zip(self.start, self.parameters, strict=True):
            start.grad = self.movement(start, parameter)
        self.outer.step()
        for start, parameter in zip(self.start, self.parameters, strict=True):
            self.keep(start, parameter)

    def movement(self, start: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        moved = start - parameter
        self.average(moved)
        return moved

    def keep(self, start: torch.Tensor, parameter: torch.Tensor) -> None:
        parameter.copy_(start)


@mutant(caught="parameters rounding", accept="diloco:2", world=2, steps=4, step=1)
class OuterWithoutNesterov(_Outer):
    """Plain momentum, where Nesterov's was said."""

    how = MappingProxyType({"lr": 0.7, "momentum": 0.9})


@mutant(caught="parameters rounding", accept="diloco:2", world=2, steps=4, step=1, seldom=True)
class OuterBySums(_Outer):
    """The sum of the ranks' movements."""

    def movement(self, start: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return super().movement(start, parameter) * self.world


@mutant(
    caught="parameters rounding, agreement", accept="diloco:2", world=2, steps=4, step=1,
    seldom=True,
)  # fmt: skip
class OuterOfEachRank(_Outer):
    """Each rank's outer optimizer steps by what it moved itself."""

    def movement(self, start: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return start - parameter


@mutant(caught="parameters rounding", accept="diloco:2", world=2, steps=4, step=3, seldom=True)
class OuterForgetsItsMomentum(_Outer):
    """A new outer optimizer for each outer step."""

    def combine(self, step: int) -> None:
        self.outer = torch.optim.SGD(self.start, **self.how)
        super().combine(step)


class _Mixing(_Combining):
    """A ring: a third each."""

    def combine(self, step: int) -> None:
        for parameter in self.parameters:
            held = [torch.empty_like(parameter) for _ in range(self.world)]
            dist.all_gather(held, parameter.data)
            weights = self.weights(step)
            parameter.copy_(sum(w * one for w, one in zip(weights, held, strict=True)))

    def weights(self, step: int) -> list[float]:
        row = [0.0] * self.world
        for neighbor in (-1, 0, 1):
            row[(self.rank + neighbor) % self.world] += 1 / 3
        return row


@mutant(caught="parameters rounding", accept="gossip", steps=2)
class MixesWithOneHub(_Mixing):
    """All take half of rank 0: rows sum to one, columns do not, and the mean moves."""

    def weights(self, step: int) -> list[float]:
        row = [0.0] * self.world
        row[self.rank] += 0.5
        row[0] += 0.5
        return row


@mutant(caught="parameters rounding", accept="gossip:ring", steps=2, seldom=True)
class MixesWithOneSideOnly(_Mixing):
    """Half of the rank, half of its right neighbor: doubly stochastic, and not the ring."""

    def weights(self, step: int) -> list[float]:
        row = [0.0] * self.world
        row[self.rank] = row[(self.rank + 1) % self.world] = 0.5
        return row


@mutant(caught="parameters rounding", accept="gossip:ring", steps=2, seldom=True)
class MixesAtEverySecondStep(_Mixing):
    """The other steps are forgotten."""

    def weights(self, step: int) -> list[float]:
        own = [float(rank == self.rank) for rank in range(self.world)]
        return own if step % 2 == 0 else super().weights(step)


@mutant(caught="parameters rounding", accept="gossip:ring", steps=2, seldom=True)
class MixesBeforeTheStep(_Mixing):
    """The neighbors' parameters are mixed, and then each rank steps."""

    @torch.no_grad()
    def step(self) -> None:
        self.combine(self.steps)
        self.optimizer.step()
        self.steps += 1
