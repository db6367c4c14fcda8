"""Tokens in a mesh of data and tensor parallelism: the workload `tokens`, its heads divided.

Ranks of one data coordinate read the same sequences, so their tokens count once.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distcheck.contract import Step, strategy

_COLUMNS = ("queries", "keys", "values", "up")
_ROWS = ("out", "down")


@strategy(parallel={"data": -1, "tensor": 2})
class ByTokens:
    """Gradients are added up over the data coordinates, each weighted by its tokens."""

    def wrap(self, model: nn.Module) -> nn.Module:
        shape = (dist.get_world_size() // 2, 2)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        names = [name for name, _ in model.named_modules()]
        plan = {name: ColwiseParallel() for name in names if name.endswith(_COLUMNS)}
        plan |= {name: RowwiseParallel() for name in names if name.endswith(_ROWS)}
        return parallelize_module(model, self.mesh["tensor"], plan)

    def share(self, step: Step) -> float:
        """Of this rank's mean in that of all tokens."""
        tokens = torch.tensor(step.tokens)
        dist.all_reduce(tokens, group=self.mesh.get_group("data"))
        return step.tokens / max(1, int(tokens))

    def sync(self, model: nn.Module, step: Step) -> None:
        share = self.share(step)
        for parameter in model.parameters():
            gradient = parameter.grad
            held = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            held.mul_(share)
            dist.all_reduce(held, group=self.mesh.get_group("data"))


@strategy(parallel={"data": -1, "tensor": 2})
class CountsPerTensorRank(ByTokens):
    """Wrong: the tokens of all ranks are added up, those of tensor ranks twice."""

    def share(self, step: Step) -> float:
        tokens = torch.tensor(step.tokens)
        dist.all_reduce(tokens)
        return step.tokens / max(1, int(tokens))


@strategy(parallel={"data": -1, "tensor": 2})
class CountsAlike(ByTokens):
    """Wrong: the mean of the data coordinates' means."""

    def share(self, step: Step) -> float:
        return 1 / step.shards
