"""A perceptron of 26 thousand parameters: what a step takes beside its arithmetic."""

from collections.abc import Iterable
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch

_INPUTS = 8


class FirstNumbers(nn.Module):
    """The first numbers of each sample."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[samples, ...] to [samples, 8]."""
        return inputs.flatten(1)[:, :_INPUTS]


class SmallMLP:
    """Eight numbers of each sample, then 128, 128, 64, classes; SGD with momentum."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """ReLU between the layers."""
        assert prod(sample_shape) >= _INPUTS
        return nn.Sequential(
            FirstNumbers(),
            nn.Linear(_INPUTS, 128),
            nn.ReLU(),
            nn.Linear(128, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy, the mean over the shard."""
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD, learning rate 0.05, momentum 0.9."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


workload = SmallMLP()
