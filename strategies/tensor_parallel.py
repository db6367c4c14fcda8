"""Tensor parallelism by torch's `parallelize_module`: linear layers split by columns and by rows.

The first, third, ... linear layer of a chain is split by columns: each rank computes some of its
outputs. The layer after it is split by rows: each rank multiplies the outputs that it has by the
weights that belong to them, and the partial sums are added up. Between the two nothing is sent.
"""

import itertools

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from distcheck.contract import strategy


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


@strategy(parallel={"tensor": -1}, workload="mlp")
class TensorParallel:
    """Every pair of linear layers; one that is left over stays whole, on every rank."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Parameters of the divided layers become DTensors, in place."""
        if not isinstance(model, nn.Sequential):
            raise ValueError(f"it is a {type(model).__name__}, and not a chain of layers")
        plan, world = pairs_of(model), dist.get_world_size()
        for name, style in plan.items():
            weight = model.get_parameter(f"{name}.weight")  # [outputs, inputs]
            if isinstance(style, ColwiseParallel) and len(weight.chunk(world)) < world:
                raise ValueError(f"{len(weight)} outputs leave some of {world} ranks without any")
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("tensor",))
        return parallelize_module(model, mesh, plan)


@strategy(parallel={"tensor": -1}, workload="transformer")
class TransformerTensorParallel:
    """A transformer: each rank has some of the heads, and some of the feed-forward's columns."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """For the workload `transformer`; embedding, LayerNorm and head stay whole."""
        world, plan = dist.get_world_size(), dict[str, ParallelStyle]()
        for name, module in model.named_modules():
            if name.endswith(".attention"):
                if module.heads % world:
                    raise ValueError(f"{module.heads} heads cannot be divided by {world} ranks")
                plan |= {
                    f"{name}.{part}": ColwiseParallel() for part in ("queries", "keys", "values")
                }
                plan[f"{name}.out"] = RowwiseParallel()
            elif name.endswith(".feed"):
                plan |= {f"{name}.up": ColwiseParallel(), f"{name}.down": RowwiseParallel()}
        if not plan:
            raise ValueError("it has no attention; give --workload transformer")
        mesh = init_device_mesh(next(model.parameters()).device.type, (world,))
        return parallelize_module(model, mesh, plan)
