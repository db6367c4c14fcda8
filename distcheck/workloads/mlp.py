"""A three-layer perceptron: the quickest real training, no convolution, no buffers."""

from collections.abc import Iterable
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch


class MLP:
    """Flatten, 128, 64, classes; SGD with momentum."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """ReLU between the layers; any sample shape will do."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(prod(sample_shape), 128),
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


workload = MLP()
