"""torch's fully sharded data parallel (FSDP2): each rank keeps a shard of every parameter.

Parameters are gathered for forward and backward and freed again; gradients are reduced and
scattered while backward runs, and each rank updates its own part. No rank ever has the whole of
its own gradient where a hook on the model's parameters could see it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distcheck.contract import Step, strategy


# Parameters must be contiguous and of one dtype, and have something in them to be cut up.
@strategy(
    weighting="loss",
    sync="out-of-sight",
    buffers="local",
    optimizer_state="cut",
    declines=(
        "zero_size",
        "channels_last",
        "transposed",
        "mixed_dtypes",
        "complex",
        "complex128",
        "sparse",
        "absent_on_some",  # a rank packs the gradients that it has, and others add up others
    ),
)
class FSDP:
    """Shards the whole model as one group; parameters become DTensors, in place."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """A parameter without dimensions cannot be cut: those stay whole, on every rank."""
        self._uncut = [parameter for parameter in model.parameters() if parameter.dim() == 0]
        device = next(model.parameters()).device.type
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params=set(self._uncut))
        return model

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        """Every rank counts the same, so unequal shards carry their weight in the loss."""
        return loss if step.weight == 1.0 else loss * step.weight

    def sync(self, model: nn.Module, step: Step) -> None:
        """What FSDP ignores is averaged here."""
        for parameter in self._uncut:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=step.group)
                parameter.grad.div_(step.world_size)
