"""Outputs, gradients and losses that are made of differences of nearly equal numbers: rounded by
more than their size says.
"""

import torch
from torch import nn

from tests.mutants.small import Points, Small


class Difference(nn.Module):
    """Two layers that began as one, but for a ten-thousandth."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs)
        with torch.no_grad():
            for ours, theirs in zip(self.one.parameters(), self.other.parameters(), strict=True):
                theirs.copy_(ours * 0.9999)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One less the other."""
        difference: torch.Tensor = self.one(inputs) - self.other(inputs)
        return difference


class Canceling(Small):
    """One layer, which is such a difference."""

    def model(self, *, sample_shape, classes):
        return nn.Sequential(Difference(*sample_shape, classes))  # type: ignore[call-arg]

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.0)  # so that they stay close


class CancelingLoss(Small):
    """The mean of the squares of such a difference. What goes back from its two layers to the first
    one is nearly equal, too, and of the other sign.
    """

    def model(self, *, sample_shape, classes):
        first = nn.Linear(*sample_shape, 64)  # type: ignore[call-arg]
        return nn.Sequential(first, nn.Tanh(), Difference(64, classes))

    def loss(self, model, batch):
        return model(batch.inputs).square().mean()

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.0)


class Points64(Points):
    """64 samples."""

    def size(self, *, train: bool) -> int:
        return 64


class BothSigns(Small):
    """A loss of both signs, as policy gradients have, whose large terms cancel in every epoch."""

    def samples(self):
        return Points64()

    def loss(self, model, batch):
        advantages = 1000.1 * (batch.ids - 31.5)
        return (advantages.to(batch.inputs) + model(batch.inputs)[:, 0]).mean()
