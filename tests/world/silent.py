"""Models whose gradients show some mistakes, or none; and code that makes those."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distcheck.workloads.cells.samples import FEATURES, CellSamples, CellWorkload


class OneSample(CellSamples):
    """Every sample is the same."""

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(torch.zeros_like(ids), train=train, dtype=dtype)


class Alike(CellWorkload):
    """All ranks have the same gradients."""

    def samples(self) -> CellSamples:
        return OneSample()

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, classes))


class MostlyDead(nn.Module):
    """Three tensors of four are multiplied by zero."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.alive = nn.Parameter(torch.randn(classes, FEATURES) / 14)
        self.dead = nn.ParameterList([torch.zeros(classes) for _ in range(3)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        nothing = sum(dead * 0.0 for dead in self.dead)
        logits: torch.Tensor = F.linear(inputs.flatten(1), self.alive) + nothing
        return logits


class Dead(CellWorkload):
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return MostlyDead(classes)


class AllDead(CellWorkload):
    """The loss depends on no parameter."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return MostlyDead(classes).requires_grad_(True)

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        return sum((p * 0.0).sum() for p in model.parameters()) + 1.0  # type: ignore[return-value]


class Adapter(nn.Module):
    """LoRA as it begins: B is zero, so A has no gradient at step 0."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, classes).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, FEATURES) / 14)
        self.b = nn.Parameter(torch.zeros(classes, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        flat = inputs.flatten(1)
        logits: torch.Tensor = self.base(flat) + flat @ self.a.t() @ self.b.t()
        return logits


class LoRA(CellWorkload):
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Adapter(classes)


def nothing(model: nn.Module) -> None:
    """Exchanges nothing."""


def mean(model: nn.Module) -> None:
    """Is right."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def without_rank_2(model: nn.Module) -> None:
    """Loses a rank, and divides by all."""
    for parameter in model.parameters():
        if dist.get_rank() == 2:
            parameter.grad.zero_()  # type: ignore[union-attr]
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
