"""A strategy that is right, and turns TensorFloat-32 on in its ranks: what the bounds say of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def allreduce(model: nn.Module) -> None:
    """From the second step on, factors are rounded to 10 bits."""
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = "tf32"
    backends.cudnn.conv.fp32_precision = "tf32"
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()
