"""A perceptron of 26 thousand parameters: what a step takes beside its arithmetic."""

from math import prod

import torch
from torch import nn

from distcheck.workloads.mlp import MLP

_INPUTS = 8


class FirstNumbers(nn.Module):
    """The first numbers of each sample."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[samples, ...] to [samples, 8]."""
        return inputs.flatten(1)[:, :_INPUTS]


class SmallMLP(MLP):
    """Eight numbers of each sample, then 128, 128, 64, classes; trained as `mlp` is."""

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


workload = SmallMLP()
