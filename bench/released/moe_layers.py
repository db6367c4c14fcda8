"""Experts of st-moe-pytorch and soft-moe-pytorch, spread over the ranks: a loss of what they make.

Each sample is given to every expert. The loss is the variance over the samples of all ranks, so
that one process alone has another loss: what experts make of a sample is the same everywhere.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare, without
from gathering import Gather

_EXPERTS = 4


class _Spread(nn.Module):
    module = ""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        without("colt5_attention")
        experts = [nn.Linear(8, 8) for _ in range(_EXPERTS)]
        self.made = bare(self.module).Experts(experts)

    def forward(self, features: Tensor) -> Tensor:
        given = features[:, None, None].expand(-1, _EXPERTS, 1, -1)
        found: Tensor = self.made(given)
        weights = torch.arange(1.0, _EXPERTS + 1).to(found)[None, :, None, None]
        rows: Tensor = Gather.apply((found.tanh() * weights).sum((1, 2)))
        return rows.var(0).sum()


class st_moe(_Spread):
    module = "st_moe_pytorch.st_moe_pytorch"


class soft_moe(_Spread):
    module = "soft_moe_pytorch.soft_moe"


class _Gathers(nn.Module):
    """What their `AllGather` does, with a backward that adds up what all ranks have."""

    def forward(self, rows: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return Gather.apply(rows.contiguous()), torch.tensor([len(rows)] * dist.get_world_size())


class st_moe_repaired(st_moe):
    def __init__(self) -> None:
        super().__init__()
        self.made.all_gather = _Gathers()


class soft_moe_repaired(soft_moe):
    def __init__(self) -> None:
        super().__init__()
        self.made.all_gather = _Gathers()
