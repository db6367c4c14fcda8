"""A perceptron of 1,200 parameters: what is quickest to train, record and judge."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch


class Small:
    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.AvgPool2d(8), nn.Flatten(),
            nn.Linear(sample_shape[0] * (sample_shape[1] // 8) * (sample_shape[2] // 8), 16),
            nn.Tanh(), nn.Linear(16, 14), nn.Tanh(), nn.Linear(14, classes),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
