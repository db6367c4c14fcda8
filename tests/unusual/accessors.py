"""A layer that is divided by columns, put together by the strategy's own accessors."""

import torch
import torch.distributed as dist
from distcheck_strategies.column_parallel import ColumnParallel, ColumnParallelLinear
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from distcheck.contract import strategy


def _whole(tensor, parameter, divided):
    if tensor is None or parameter not in divided:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


@strategy(parallel={"tensor": -1})
class WithAccessors(ColumnParallel):
    """Each gathers the parts along the first dimension."""

    def _together(self, model, take):
        layers = [m for m in model.modules() if isinstance(m, ColumnParallelLinear)]
        divided = {parameter for layer in layers for parameter in layer.parameters()}
        named = list(model.named_parameters())
        return {name: _whole(take(p), p, divided) for name, p in named}

    def full_parameters(self, model: nn.Module):
        return self._together(model, lambda parameter: parameter.detach())

    def full_gradients(self, model: nn.Module):
        return self._together(model, lambda parameter: parameter.grad)


@strategy(parallel={"tensor": -1})
class GivesNoGradients(WithAccessors):
    """Its accessor returns nothing: nothing is known of its gradients."""

    def full_gradients(self, model: nn.Module):
        return None


@strategy(parallel={"tensor": -1})
class LeavesOneOut(WithAccessors):
    """Of one parameter nothing is given."""

    def full_parameters(self, model: nn.Module):
        found = super().full_parameters(model)
        del found["0.bias"]
        return found


@strategy(parallel={"tensor": -1})
class HalfAPair(ColumnParallel):
    """One accessor, and not the other."""

    def full_gradients(self, model: nn.Module):
        return {}


@strategy(parallel={"pipeline": 1, "tensor": 2})
class DTensorsAndPieces:
    """One layer as DTensors, another in pieces of its own."""

    def wrap(self, model):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        model[2] = ColumnParallelLinear(model[2])
        return model
