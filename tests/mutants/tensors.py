"""Layers that are divided over ranks, wrongly: by columns, by rows, in a mesh with data."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distcheck.contract import Batch, LossOf, Step, strategy

from . import mutant


class _Same(torch.autograd.Function):
    """The same forward; the sum over ranks backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _total(gradient)


class _SameInBFloat16(_Same):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _total(gradient.bfloat16()).to(gradient.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, columns: torch.Tensor, backwards: bool) -> torch.Tensor:
        parts = [torch.empty_like(columns) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, columns.contiguous())
        return torch.cat(parts[::-1] if backwards else parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _mine(gradient), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return _mine(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, dim=-1)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, term: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.again = again
        return _total(term)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _total(gradient) if ctx.again else gradient, None


def _total(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total)
    return total


def _mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


class _Columns(nn.Module):
    def __init__(self, linear: nn.Linear, way: Any) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(world)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(world)[rank].clone())
        self.way = way

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        columns = F.linear(self.way.enter(inputs), self.weight, self.bias)
        return _Gather.apply(columns, self.way.backwards)


class _Rows(nn.Module):
    def __init__(self, linear: nn.Linear, way: Any) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(world, dim=1)[rank].clone())
        self.bias, self.way = linear.bias, way

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        early = self.bias if self.way.bias_on_every_rank else None
        total = _Sum.apply(F.linear(_Slice.apply(inputs), self.weight, early), self.way.again)
        total = total / dist.get_world_size() if self.way.averages else total
        return total if self.way.bias_on_every_rank else total + self.bias


class _Layers:
    """Replaces linear layers; what a mutant does otherwise is an attribute of its class."""

    backwards = again = averages = bias_on_every_rank = False
    layer: Any = _Columns
    places: Any = slice(None)

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Same.apply(inputs)

    def wrap(self, model: nn.Module) -> nn.Module:
        linear = [name for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
        for name in linear[self.places]:
            setattr(model, name, self.layer(model.get_submodule(name), self))
        return model


@mutant(caught="gradients full batch float64", world=2, dtype="float64", seldom=True)
@strategy(parallel={"tensor": -1})
class NoSumInBackward(_Layers):
    """Each rank passes on its own share of the inputs' gradient, to a layer that is divided too."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


@mutant(caught="gradients full batch float32, agreement", world=2, steps=1)
@strategy(parallel={"tensor": -1})
class SharesOfAWholeLayer(NoSumInBackward):
    """The same, to a layer that every rank holds whole."""

    places = slice(1, None)


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"tensor": -1})
class SumInBFloat16(_Layers):
    """What backward adds up between ranks is rounded to bfloat16."""

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        return _SameInBFloat16.apply(inputs)


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    world=2,
    seldom=True,
)
@strategy(parallel={"tensor": -1})
class PartsTheOtherWayRound(_Layers):
    """The ranks' columns are put side by side in the wrong order."""

    backwards = True


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    world=2,
)
@strategy(parallel={"tensor": -1})
class BiasOnEveryRank(_Layers):
    """A row-split bias is added on every rank, before the sum."""

    layer, bias_on_every_rank = _Rows, True


@mutant(
    caught="gradients full batch float32, loss full batch float32, outputs full batch float32",
    world=2,
    seldom=True,
)
@strategy(parallel={"tensor": -1})
class AveragesTerms(_Layers):
    """The ranks' terms are averaged where they must be added up."""

    layer, averages = _Rows, True


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"tensor": -1})
class SumsBothWays(_Layers):
    """The sum's backward is a sum as well, as that of a functional all_reduce is."""

    layer, again = _Rows, True


def _divided(model: nn.Module, mesh: Any) -> nn.Module:
    """Two of the linear layers; what is left over stays whole."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    plan = dict(zip(names, [ColwiseParallel(), RowwiseParallel()], strict=False))
    return parallelize_module(model, mesh, plan)


class _Tensors:
    def wrap(self, model: nn.Module) -> nn.Module:
        return _divided(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def _held(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


@mutant(caught="gradients full batch float32", world=2, workload=".small:Three", seldom=True)
@strategy(parallel={"tensor": -1})
class SumsAWholeLayer(_Tensors):
    """The gradient of a layer that every rank holds whole is added up over them."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model[-1].parameters():
            dist.all_reduce(parameter.grad)


@mutant(caught="gradients full batch float32", world=2, workload=".small:Three", seldom=True)
@strategy(parallel={"tensor": -1})
class DividesAWholeLayer(_Tensors):
    """The same gradient is divided by the number of ranks, as after a sum that was left out."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model[-1].parameters():
            parameter.grad /= step.world_size


@mutant(caught="gradients full batch float32", world=2)
@strategy(parallel={"tensor": -1})
class HalvesOnePiece(_Tensors):
    """One rank halves the gradient of its own columns."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if step.rank == 1:
            model[0].weight.grad.to_local().mul_(0.5)


@mutant(caught="gradients full batch float32", world=2, seldom=True)
@strategy(parallel={"tensor": -1})
class AveragesPieces(_Tensors):
    """Gradients of different pieces are averaged, as if ranks were replicas."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            gradient = _held(parameter.grad)
            dist.all_reduce(gradient)
            gradient /= step.world_size


@mutant(caught="agreement", world=2, workload=".small:Three")
@strategy(parallel={"tensor": -1})
class LastBitsOfOneReplica(_Tensors):
    """One rank's copy of a whole layer's gradient has other last bits."""

    def sync(self, model: nn.Module, step: Step) -> None:
        if step.rank == 1:
            model[-1].weight.grad *= 1 + 2.0**-23


@mutant(caught="loss full batch float32", world=2, seldom=True)
@strategy(parallel={"tensor": -1})
class ReturnsTwiceTheLoss(_Tensors):
    """Gradients are right; the loss that is returned is not."""

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        loss = loss_of(batch)
        loss.backward()
        return 2 * loss


@mutant(
    caught="parameters bitwise, agreement", world=2, workload=".small:Three", step=1, steps=2,
    seldom=True,
)  # fmt: skip
@strategy(parallel={"tensor": -1})
class MovesAfterTheStep(_Tensors):
    """A rank's copy of a whole layer is moved after the optimizer's step."""

    def sync(self, model: nn.Module, step: Step) -> None:
        self.model = model

    def optimizer(self, build: Any, parameters: Any) -> Any:
        made, steps = build(parameters), []

        def move(*_: object) -> None:
            steps.append(1)
            if len(steps) == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    self.model[-1].weight.mul_(1.01)

        made.register_step_post_hook(move)
        return made


class _Mesh:
    """Pairs of ranks hold the model; each pair reads its own samples."""

    def wrap(self, model: nn.Module) -> nn.Module:
        shape = (dist.get_world_size() // 2, 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        return _divided(model, self.mesh["tensor"])

    def average(self, model: nn.Module, weight: float, axis: str = "data") -> None:
        for parameter in model.parameters():
            gradient = _held(parameter.grad)
            gradient.mul_(weight)
            dist.all_reduce(gradient, group=self.mesh.get_group(axis))


@mutant(caught="gradients full batch float32, agreement", steps=1, seldom=True)
@strategy(parallel={"data": -1, "tensor": 2})
class NoMeanOverData(_Mesh):
    """Nothing is exchanged between the pairs."""


@mutant(caught="gradients full batch float32", world=6, seldom=True)
@strategy(parallel={"data": 3, "tensor": 2})
class SumOverData(_Mesh):
    """The pairs' gradients are added up, and not divided."""

    def sync(self, model: nn.Module, step: Step) -> None:
        self.average(model, step.weight)


@mutant(caught="gradients full batch float32", world=6, seldom=True)
@strategy(parallel={"data": 3, "tensor": 2})
class PairsCountAlike(_Mesh):
    """The mean over the pairs, whose numbers of samples differ by one."""

    def sync(self, model: nn.Module, step: Step) -> None:
        self.average(model, 1 / step.shards)


@mutant(caught="gradients full batch float32, agreement", steps=1, seldom=True)
@strategy(parallel={"data": -1, "tensor": 2})
class MeanOverTheOtherAxis(_Mesh):
    """Gradients are averaged in the pairs, whose ranks hold other pieces, and not over data."""

    def sync(self, model: nn.Module, step: Step) -> None:
        self.average(model, 0.5, "tensor")
