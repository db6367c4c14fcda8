"""Optimizer state or parameters that are divided among the ranks, and get lost on the way."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from distcheck.contract import Build, Step, strategy

from . import mutant


class _Owning(Optimizer):
    """Every rank updates the parameters that it owns, and broadcasts them; but for those `kept`."""

    def __init__(
        self, inner: Optimizer, parameters: list[nn.Parameter], kept: tuple[int, ...]
    ) -> None:
        super().__init__(parameters, {})
        self.optim, self.kept = inner, kept

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optim.step()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            if index not in self.kept:
                dist.broadcast(parameter.data, index % dist.get_world_size())


class _ToOwners:
    """Right so far: ZeRO-2, a gradient reduced to its owner and dropped elsewhere."""

    divides, kept, off = True, (), 0

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.parameters = list(parameters)
        own = self.parameters[dist.get_rank() :: dist.get_world_size()]
        return _Owning(build(own), self.parameters, self.kept)

    def sync(self, model: nn.Module, step: Step) -> None:
        for index, parameter in enumerate(self.parameters):
            owner = (index + self.off) % step.world_size
            dist.reduce(parameter.grad, owner)
            if step.rank != owner:
                parameter.grad = None
            elif self.divides:
                parameter.grad /= step.world_size


@mutant(caught="gradients rounding, gradients full batch float32")
@strategy(optimizer_state="sharded", gradients="owner", one_group=True)
class OwnersDoNotDivide(_ToOwners):
    """Owners hold sums; every rank's parameters agree."""

    divides = False


@mutant(caught="gradients rounding, gradients full batch float32")
@strategy(optimizer_state="sharded", gradients="owner", one_group=True)
class ReducesToTheNextRank(_ToOwners):
    """The sum is on the rank after the one whose optimizer updates the parameter."""

    off = 1


@mutant(caught="parameters bitwise, agreement", steps=1)
@strategy(optimizer_state="sharded", gradients="owner", one_group=True)
class LastParameterNotSentOn(_ToOwners):
    """As in a distributed Muon whose padded list ends too early: one parameter is not broadcast."""

    kept = (3,)


class _Averages:
    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


@mutant(caught="parameters bitwise")
@strategy(optimizer_state="sharded")
class StateEverywhere(_Averages):
    """Promises a W-th of the state on each rank; every rank keeps all of it."""


class _Sharded(_Averages):
    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        self.sharded = ZeroRedundancyOptimizer(parameters, optimizer_class=build)
        return self.sharded


@mutant(caught="parameters bitwise")
@strategy(optimizer_state="sharded")
class StateNowhere(_Sharded):
    """State is thrown away after every step: nothing is left to compare, which is no pass."""

    def optimizer(self, build: Build, parameters: Iterable[nn.Parameter]) -> Optimizer:
        super().optimizer(build, parameters)
        inner = self.sharded.optim
        inner.register_step_post_hook(lambda *_: inner.state.clear())
        return self.sharded


@mutant(caught="parameters bitwise", step=1)
@strategy(optimizer_state="sharded")
class MomentumLostOnOneRank(_Sharded):
    """One rank's part of the state is lost between two steps, as by a bad checkpoint."""

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        if step.index == 1 and step.rank == 1:
            self.sharded.optim.state.clear()


@mutant(caught="gradients rounding, gradients full batch float32", world=3)
@strategy(weighting="loss", sync="out-of-sight", buffers="local")
class FSDPWithoutWeights:
    """Fully sharded, and the mean of means; no local gradient was there to be compared."""

    def wrap(self, model: nn.Module) -> nn.Module:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model


@mutant(caught="parameters bitwise", step=1)
@strategy(weighting="loss", sync="out-of-sight", buffers="local", optimizer_state="cut")
class FSDPThatDecays(FSDPWithoutWeights):
    """A part of one parameter is touched on one rank: seen in the whole, on all of them."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if step.index == 1 and step.rank == 1:
            with torch.no_grad():
                next(model.parameters()).to_local().mul_(1 - 1e-6)  # type: ignore[attr-defined]


@mutant(caught="parameters bitwise", workload="clipping", world=2)
@strategy(weighting="loss", sync="out-of-sight", buffers="local", optimizer_state="cut")
class ClipsByTheLocalNorm(FSDPWithoutWeights):
    """Each rank clips the pieces that it holds by their own norm."""

    def clip(self, model: nn.Module, max_norm: float) -> None:
        pieces = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = torch.stack([piece.norm() for piece in pieces]).norm()
        for piece in pieces:
            piece.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
