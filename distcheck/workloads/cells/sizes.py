"""Cells that differ in how large parameters are, and how they lie in memory."""

from collections.abc import Sequence

import torch
from torch import nn

from distcheck.records import expected_events as happenings
from distcheck.records.expected_events import Permuted, Remainder, Shapes
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellWorkload, Layers

KIB_128, MIB_1 = 1 << 15, 1 << 18  # elements of float32
_BOUNDARIES = (KIB_128, KIB_128 + 1, KIB_128 - 1, MIB_1, MIB_1 + 1, MIB_1 - 1)


class Additions(nn.Module):
    """A linear layer, to whose logits each of some parameters of any shape adds a little.

    Parameter k adds the mean of its elements, each times a small integer of its own, every third
    times another feature. So neighbors in its gradient differ, and ranks' gradients are no
    multiples of each other.
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
        """A linear layer and parameters of these shapes."""
        return Additions(self.shapes, classes)


class OneElement(_Added):
    """Parameters of one element: a scalar, and in one and in two dimensions."""

    must_happen = (Shapes(shapes=((), (1,), (1, 1))),)

    shapes = ((), (1,), (1, 1))


class ZeroSize(_Added):
    """Parameters of no element, around one that has some."""

    must_happen = (Shapes(shapes=((0,), (4, 0))),)

    shapes = ((0,), (5,), (4, 0))


class IndivisibleSizes(_Added):
    """Parameters that no world divides: primes, and products of odd numbers."""

    must_happen = (Remainder(),)

    shapes = ((3,), (7, 5), (1009,), (2,), (13, 11))


class BucketBoundaries(_Added):
    """Parameters as large as buckets are: 128 KiB and 1 MiB, and one element more and less."""

    shapes = tuple((size,) for size in _BOUNDARIES)
    must_happen = (Shapes(shapes=shapes),)


class ChannelsLast(CellWorkload):
    """Two convolutions whose weights have their channels last in memory."""

    must_happen = (Permuted(),)

    def layers(self, classes: int) -> nn.Module:
        """Gradients take their parameter's order."""
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
    """A perceptron whose weights are kept the other way round."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Parameter((torch.randn(FEATURES, WIDTH) / 16).t())
        self.second = nn.Parameter((torch.randn(WIDTH, classes) / 4).t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(inputs.flatten(1), self.first).tanh()
        return nn.functional.linear(hidden, self.second)


class OneStorage(CellWorkload):
    """Parameters that are parts of one flat tensor; the gradients have memory of their own."""

    must_happen = (happenings.OneStorage(),)

    def layers(self, classes: int) -> nn.Module:
        """As code leaves them that moves parameters as one."""
        model = Layers(classes)
        parameters = list(model.parameters())
        flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(flat, parameters)
        return model


class Transposed(CellWorkload):
    """Parameters [a, b] with strides (1, a), which their gradients take."""

    must_happen = (Permuted(),)
    layers = TransposedLayers
