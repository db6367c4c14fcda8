"""A function that averages parameters after every step: local SGD with a period of one.

$ distcheck verify --strategy examples/forms/averages_parameters.py:average_parameters --accept local-sgd:1 --world 4
PASS

Sums that are never divided.

$ distcheck verify --strategy examples/forms/averages_parameters.py:sums_parameters --accept local-sgd:1 --world 4
FAIL missing-division
"""

import torch.distributed as dist
from torch import nn


def average_parameters(model: nn.Module, world_size: int) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= world_size


def sums_parameters(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
