"""A three-layer perceptron: the quickest real training, no convolution, no buffers."""

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
    """Flatten, 128, 64, classes; SGD with momentum. It sees the first `most_inputs` numbers of a
    sample where it is given, and all of them otherwise.
    """

    def __init__(self, most_inputs: int | None = None) -> None:
        self._most_inputs = most_inputs

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """ReLU between the layers; any sample shape will do."""
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
    """`small`: 17 thousand parameters, for worlds of many ranks. Raises UsageError."""
    if words != "small":
        raise UsageError(f"workload mlp:{words} is unknown; known is mlp:small")
    return MLP(_FEW_INPUTS)
