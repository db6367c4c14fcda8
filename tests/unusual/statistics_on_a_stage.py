"""A chain whose BatchNorm is in the second stage, and whose inputs are far from what it assumes."""

from math import prod

import torch
from torch import nn

from distcheck.workloads.mlp import MLP


class Shifted(MLP):
    """What enters BatchNorm has a mean of 20: without its statistics, evaluation is a guess."""

    def model(self, *, sample_shape, classes):
        first = nn.Linear(prod(sample_shape), 64)
        with torch.no_grad():
            first.bias.fill_(20.0)
        norm = nn.BatchNorm1d(64, momentum=0.5)
        return nn.Sequential(nn.Flatten(), first, norm, nn.ReLU(), nn.Linear(64, classes))
