"""The built-in all-reduce with one error of a size that is said with `--set`.

EXPONENT k: every gradient is 1 + 2**-k times too large, on every rank alike.
BIT b: bit b of the mantissa of one element of the first gradient is flipped.
"""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import BackendAllReduce, Step, strategy

EXPONENT = 0
BIT = 0
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _average(model: nn.Module, step: Step) -> None:
    for parameter in model.parameters():
        if step.weight != 1.0:
            parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(step.world_size)


def _flip(model: nn.Module) -> None:
    gradient = next(model.parameters()).grad
    sizes = gradient.abs().reshape(-1)
    sizes = torch.where(sizes > 0, sizes, torch.inf)  # where a ReLU is shut there is no mantissa
    element = sizes.argsort()[int((sizes < torch.inf).sum()) // 2]
    gradient.view(_INTEGERS[gradient.dtype]).view(-1)[element] ^= 1 << BIT


@strategy(order=BackendAllReduce(), scale="divide-after")
def scaled(model: nn.Module, step: Step) -> None:
    """Too large by 2**-EXPONENT."""
    _average(model, step)
    for parameter in model.parameters():
        parameter.grad.mul_(1 + 2.0**-EXPONENT)


@strategy(order=BackendAllReduce(), scale="divide-after")
def flipped_on_one_rank(model: nn.Module, step: Step) -> None:
    """Bit BIT of the median element, on rank 1 alone."""
    _average(model, step)
    if step.rank == 1:
        _flip(model)


@strategy(order=BackendAllReduce(), scale="divide-after")
def flipped_on_all_ranks(model: nn.Module, step: Step) -> None:
    """The same on every rank, so that ranks agree."""
    _average(model, step)
    _flip(model)
