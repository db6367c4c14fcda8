"""Data and training of most cells: small images, a perceptron, cross-entropy, SGD."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.workloads.datasets.synthetic import ComputedSamples, hash24

SHAPE = (3, 8, 8)
FEATURES = 3 * 8 * 8
WIDTH = 16  # of hidden layers
_CLASSES = 4


class CellSamples(ComputedSamples):
    """`size` images of 3x8x8 in [-1, 1), four classes; the test split has the same size."""

    shape = SHAPE
    classes = _CLASSES

    def __init__(self, size: int = 1024) -> None:
        self._size = size

    def size(self, *, train: bool) -> int:
        return self._size

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [n, 3, 8, 8] in `dtype` and labels [n] int64, the same in every process."""
        rows = self.rows(ids, train=train)
        keys = rows.unsqueeze(1) * 1009 + torch.arange(FEATURES)
        images = hash24(keys).to(torch.float32).div_(2**23).sub_(1.0).to(dtype).view(-1, *SHAPE)
        self.mark(images[:, 0, 0, 0], ids)
        return images, hash24(rows * 8191 + 1) % _CLASSES

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        """Write a mark to the first pixels [n] of samples, for a cell that must recognize them."""


class Layers(nn.Module):
    """inputs [n, 3, 8, 8] -> logits [n, classes]; the layer `middle` is optional."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.outputs = nn.Linear(WIDTH, classes)
        self.skips_middle = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(inputs.flatten(1)).tanh()
        if not self.skips_middle:
            hidden = self.middle(hidden).tanh()
        logits: torch.Tensor = self.outputs(hidden)
        return logits


class Classifier:
    """Training of most workloads; subclasses add a model."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD, learning rate 0.05, momentum 0.9, so that wrong updates show later."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class CellWorkload(Classifier):
    """Base class of cells. `layers` of a subclass builds its model."""

    layers: Callable[[int], nn.Module] = Layers

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return self.layers(classes)

    def samples(self) -> CellSamples:
        return CellSamples()
