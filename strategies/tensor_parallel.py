"""Tensor parallelism by torch's `parallelize_module`: linear layers split by columns and by rows.

The first, third, ... linear layer of a chain is split by columns: each rank computes some of its
outputs. The layer after it is split by rows: each rank multiplies the outputs that it has by the
weights that belong to them, and the partial sums are added up. Between the two nothing is sent.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distcheck.contract import strategy


@strategy(parallel={"tensor": -1})
class TensorParallel:
    """Every pair of linear layers; one that is left over stays whole, on every rank."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Parameters of the divided layers become DTensors, in place."""
        names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
        styles = [ColwiseParallel(), RowwiseParallel()] * (len(names) // 2)
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tensor",))
        return parallelize_module(model, mesh, dict(zip(names, styles, strict=False)))
