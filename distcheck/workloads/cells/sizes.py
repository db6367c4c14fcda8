"""Cells that differ in the sizes of parameters and in their memory layout."""

from collections.abc import Sequence

import torch
from torch import nn

from distcheck.records import expected_events as happenings
from distcheck.records.expected_events import (
    GradientShapes,
    GradientWithMoreBytes,
    GradientWithMoreElements,
    IndivisibleParameter,
    PermutedMemoryLayout,
)
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellWorkload, Layers

KIB_128, MIB_1 = 1 << 15, 1 << 18  # elements of float32
MIB_25, POWER_24 = 25 << 20, 1 << 24  # bytes; elements
_BOUNDARIES = (KIB_128, KIB_128 + 1, KIB_128 - 1, MIB_1, MIB_1 + 1, MIB_1 - 1)


class LinearWithTerms(nn.Module):
    """A linear layer. Additional parameters of any shape each add a small term to its logits.

    Parameter k adds the mean of its elements. Each element is multiplied by a small integer, and
    every third element by a different feature. Neighboring elements of its gradient therefore
    differ, and ranks' gradients are not multiples of each other.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, classes)
        self.added = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        features = inputs.flatten(1)
        logits: torch.Tensor = self.linear(features)
        classes = logits.shape[1]
        for k, parameter in enumerate(self.added):
            pattern = torch.arange(parameter.numel(), device=inputs.device) % 13 + 1
            weighted = parameter.reshape(-1) * (pattern / max(1, parameter.numel()))
            for third in range(3):
                column = features[:, 3 * k + third : 3 * k + third + 1] * weighted[third::3].sum()
                place = (k + third) % classes
                logits = logits + nn.functional.pad(column, (place, classes - 1 - place))
        return logits


class _Added(CellWorkload):
    shapes: Sequence[tuple[int, ...]]

    def layers(self, classes: int) -> nn.Module:
        """Return a linear layer and parameters of these shapes."""
        return LinearWithTerms(self.shapes, classes)


class OneElement(_Added):
    """Parameters of one element: a scalar, and with one and two dimensions."""

    must_happen = (GradientShapes(shapes=((), (1,), (1, 1))),)

    shapes = ((), (1,), (1, 1))


class ZeroSize(_Added):
    """Parameters without elements, before and after a parameter with elements."""

    must_happen = (GradientShapes(shapes=((0,), (4, 0))),)

    shapes = ((0,), (5,), (4, 0))


class IndivisibleSizes(_Added):
    """Parameters whose sizes no world size divides: primes, and products of odd numbers."""

    must_happen = (IndivisibleParameter(),)

    shapes = ((3,), (7, 5), (1009,), (2,), (13, 11))


class BucketBoundaries(_Added):
    """Parameters as large as buckets: 128 KiB and 1 MiB, and one element more and less."""

    shapes = tuple((size,) for size in _BOUNDARIES)
    must_happen = (GradientShapes(shapes=shapes),)


class ChannelsLast(CellWorkload):
    """Two convolutions whose weights are in channels_last memory format."""

    must_happen = (PermutedMemoryLayout(),)

    def layers(self, classes: int) -> nn.Module:
        """Return convolutions; gradients take the memory format of their parameters."""
        layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(32, classes),
        )
        layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return layers


class TransposedLayers(nn.Module):
    """A perceptron whose weights are stored transposed."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Parameter((torch.randn(FEATURES, WIDTH) / 16).t())
        self.second = nn.Parameter((torch.randn(WIDTH, classes) / 4).t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs.flatten(1), self.first).tanh()
        return nn.functional.linear(hidden, self.second)


class SharedStorage(CellWorkload):
    """Parameters that are views of one flat tensor; each gradient has its own memory."""

    must_happen = (happenings.SharedStorage(),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model whose parameters were flattened to one tensor."""
        model = Layers(classes)
        parameters = list(model.parameters())
        flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(flat, parameters)
        return model


class Transposed(CellWorkload):
    """Parameters [a, b] with strides (1, a); their gradients have the same strides."""

    must_happen = (PermutedMemoryLayout(),)
    layers = TransposedLayers


class WideHiddenLayer(nn.Module):
    """A matrix [products, width] that maps products of pixels to a wide hidden layer with a fixed
    sum over it. Every element has a different gradient, at little cost.
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

    must_happen = (GradientWithMoreBytes(nbytes=MIB_25),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model with 2048 x 3221 elements."""
        return WideHiddenLayer(2048, 3221, classes)


class Over2To24(_Large):
    """One tensor of 16,785,405 elements: float32 represents no odd integer beyond 2^24."""

    must_happen = (GradientWithMoreElements(elements=POWER_24),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model with 4095 x 4099 elements, 64 MiB."""
        return WideHiddenLayer(4095, 4099, classes)
