"""A mesh of data and tensor parallelism: pairs of ranks hold the model, each pair its own samples.

The ranks of a row of the mesh share the layers, as in `tensor_parallel`. The ranks of a column hold
the same part of the model and read other samples: their gradients are averaged, part by part.
"""

import itertools

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from distcheck.contract import Step, strategy


def pairs_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """How linear layers are divided that follow each other, with nothing between them but what
    works on each number by itself (a ReLU): by columns, then by rows.
    """
    plan: dict[str, ParallelStyle] = {}
    heavy = [(name, layer) for name, layer in model.named_children() if list(layer.parameters())]
    for (name, layer), (after, next_layer) in itertools.pairwise(heavy):
        if isinstance(layer, nn.Linear) and isinstance(next_layer, nn.Linear) and name not in plan:
            plan |= {name: ColwiseParallel(), after: RowwiseParallel()}
    return plan


@strategy(parallel={"data": -1, "tensor": 2}, workload="mlp")
class DataTensor:
    """World 4 is a mesh of 2 x 2, world 8 one of 4 x 2."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Divides pairs of linear layers over the ranks of a row."""
        if not isinstance(model, nn.Sequential):
            raise ValueError(f"it is a {type(model).__name__}, and not a chain of layers")
        plan = pairs_of(model)
        device = next(model.parameters()).device.type
        shape, axes = (dist.get_world_size() // 2, 2), ("data", "tensor")
        self._mesh = init_device_mesh(device, shape, mesh_dim_names=axes)
        return parallelize_module(model, self._mesh["tensor"], plan)

    def sync(self, model: nn.Module, step: Step) -> None:
        """The mean over a column: of what each rank holds, weighted by its samples."""
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            held.mul_(step.weight / step.shards)
            dist.all_reduce(held, group=self._mesh.get_group("data"))
