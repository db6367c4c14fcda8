"""Layers of pytorchvideo and fvcore that exchange: norms that are synchronized, and their sums."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare

bare("fvcore.nn.distributed")  # what pytorchvideo imports of it, without its checkpoints


def _loss(out: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, out.shape[1]).to(out)
    return (out.flatten(2).tanh() * weights[None, :, None]).square().mean()


class norm_1d(nn.Module):
    """Of features [n, 4, 2], with its running statistics."""

    name, shape = "NaiveSyncBatchNorm1d", (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.made = getattr(bare("pytorchvideo.layers.batch_norm"), self.name)(4)
        with torch.no_grad():
            self.made.weight.copy_(torch.linspace(0.5, 1.5, 4))
        self.made.num_batches_tracked = None  # a count that some do not keep

    def forward(self, features: Tensor) -> Tensor:
        return _loss(self.made(features.view(-1, *self.shape)))


class norm_2d(norm_1d):
    name, shape = "NaiveSyncBatchNorm2d", (4, 2, 1)  # type: ignore


class norm_3d(norm_1d):
    name, shape = "NaiveSyncBatchNorm3d", (4, 2, 1, 1)  # type: ignore


class norm_without_statistics(norm_1d):
    """The running statistics are left out: what comes out of it, and gradients."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("running_mean", "running_var"):
            value = getattr(self.made, name)
            delattr(self.made, name)
            setattr(self.made, name, value)

    def forward(self, features: Tensor) -> Tensor:
        self.made.running_mean = self.made.running_mean.to(features)
        self.made.running_var = self.made.running_var.to(features)
        return super().forward(features)


class simclr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kind = bare("pytorchvideo.models.simclr").SimCLR
        self.made = kind(mlp=nn.Identity(), temperature=1.0)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(one, two)
        return found


def _summed(rows: Tensor) -> Tensor:
    found: Tensor = bare("fvcore.nn.distributed").differentiable_all_reduce(rows)
    return found


class sum_alone(nn.Module):
    """The mean of all samples, and nothing added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, features: Tensor) -> Tensor:
        offset = self.offset.exp()
        found = self.added(
            _summed(features.sum(0) / (len(features) * dist.get_world_size())), offset
        )
        return found.square().mean()

    def added(self, mean: Tensor, offset: Tensor) -> Tensor:
        return mean * offset


class sum_and_offset(sum_alone):
    """What is added to a sum of all ranks has the very gradient that the sum has."""

    def added(self, mean: Tensor, offset: Tensor) -> Tensor:
        return mean + offset
