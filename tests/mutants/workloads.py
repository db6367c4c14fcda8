"""Small workloads that make some mutants visible, and workloads that are mutants themselves."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.workloads.datasets.synthetic import SyntheticSamples
from distcheck.workloads.mlp import MLP

from . import mutant


class _Base:
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Normalized(_Base):
    """A perceptron with BatchNorm: shards normalize on their own."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes)
        )


class WithDropout(_Base):
    """A perceptron that draws a mask at every forward pass."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes)
        )


class TwinModel(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3072, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.outputs = nn.Linear(16, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(inputs.flatten(1)).relu()
        return self.outputs(self.second(self.first(hidden).relu()).relu())


class Twins(_Base):
    """Two layers of the same shape."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return TwinModel(classes)


class _Small(_Base):
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, classes))


@mutant(kind="workload", caught="gradients full batch float32, loss full batch float32")
class MeanOverWhatCounts(_Small):
    """A mean over samples of some classes only: shards hold different numbers of them, and a
    mean over the ranks is not the mean over the batch (transformers #34191).
    """

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        counts = batch.labels < 3
        return F.cross_entropy(model(batch.inputs)[counts], batch.labels[counts])


@mutant(kind="workload", caught="data")
class SameDataOnEveryRank(_Small):
    """A sampler that was never told its rank."""

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch)
        return torch.randperm(size, generator=generator)[: size // world + 1].tolist()


@mutant(kind="workload", caught="data", step=0)
class OverlappingShards(_Small):
    """Every rank shuffles for itself, without a common seed (Lightning #17713)."""

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        generator = torch.Generator()
        generator.manual_seed(seed + epoch + 1000 * rank)
        return torch.randperm(size, generator=generator).tolist()


class TwoStepsLong(SyntheticSamples):
    def size(self, *, train: bool) -> int:
        return 512


@mutant(kind="workload", caught="data", step=2)
class EveryEpochAlike(_Small):
    """set_epoch is never called: each epoch repeats the first (pytorch #31771)."""

    def samples(self) -> TwoStepsLong:
        return TwoStepsLong()

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        generator = torch.Generator()
        generator.manual_seed(seed)
        return torch.randperm(size, generator=generator)[rank::world].tolist()


class FreezesLater(MLP):
    """Its optimizer knows the parameters that train when it is made; one stops."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return super().optimizer(p for p in parameters if p.requires_grad)

    def before_step(self, model: nn.Module, step: int) -> None:
        model.get_submodule("1").requires_grad_(step < 2)
