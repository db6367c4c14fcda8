"""Cells with one large tensor."""

import torch
from torch import nn

from distcheck.records.expected_events import MoreBytes, MoreElements
from distcheck.workloads.cells.samples import FEATURES, CellWorkload

MIB_25, POWER_24 = 25 << 20, 1 << 24  # bytes; elements


class Wide(nn.Module):
    """A matrix [products, width] that maps products of pixels to a wide hidden layer with a fixed
    sum over it: every element has a different gradient, at little cost.
    """

    def __init__(self, products: int, width: int, classes: int) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(products, width) / products**0.5)
        self.linear = nn.Linear(FEATURES, classes)
        self._products = products

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = inputs.flatten(1)
        pixels = features[:, :64]
        products = (pixels.unsqueeze(2) * pixels.unsqueeze(1)).flatten(1)[:, : self._products]
        hidden = (products @ self.large).tanh()
        logits: torch.Tensor = self.linear(features)
        classes = logits.shape[1]
        sums = [hidden[:, k::classes].mean(1) for k in range(classes)]
        return logits + torch.stack(sums, dim=1)


class _Large(CellWorkload):
    def optimizer(self, parameters):  # type: ignore[no-untyped-def]
        """Return SGD without momentum, which would need as much memory again."""
        return torch.optim.SGD(parameters, lr=0.05)


class Over25MiB(_Large):
    """One tensor of 25.2 MiB: larger than DDP's largest bucket."""

    must_happen = (MoreBytes(nbytes=MIB_25),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model with 2048 x 3221 elements."""
        return Wide(2048, 3221, classes)


class Over2To24(_Large):
    """One tensor of 16,785,405 elements: float32 represents no odd integer beyond 2^24."""

    must_happen = (MoreElements(elements=POWER_24),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model with 4095 x 4099 elements, 64 MiB."""
        return Wide(4095, 4099, classes)
