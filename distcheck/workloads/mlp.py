"""A three-layer perceptron without convolutions or buffers: the fastest real training."""

from math import prod

import torch
from torch import nn

from distcheck.errors import UsageError
from distcheck.workloads.cells.samples import Classifier

_FEW_INPUTS = 64


class FirstNumbers(nn.Module):
    """The first numbers of each sample."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[samples, ...] to [samples, count]."""
        return inputs.flatten(1)[:, : self.count]


class MLP(Classifier):
    """Flatten, 128, 64, classes; SGD with momentum. `most_inputs` limits the inputs."""

    def __init__(self, most_inputs: int | None = None) -> None:
        self._most_inputs = most_inputs

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the model, with ReLU between the layers, for any sample shape."""
        inputs = min(prod(sample_shape), self._most_inputs or prod(sample_shape))
        return nn.Sequential(
            nn.Flatten() if self._most_inputs is None else FirstNumbers(inputs),
            nn.Linear(inputs, 128),
            nn.ReLU(),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )


workload = MLP()


def described(words: str) -> MLP:
    """Return the variant `small`: 17 thousand parameters, for large worlds. Raises UsageError."""
    if words != "small":
        raise UsageError(f"workload mlp:{words} is unknown; known is mlp:small")
    return MLP(_FEW_INPUTS)
