"""Losses of solo-learn that exchange, as a loss of two views."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare


class barlow(nn.Module):
    """What is correlated is not normalized here: each rank does that by its own samples, which is
    not what is looked at.
    """

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        module = bare("solo.losses.barlow")
        normalized = torch.nn.BatchNorm1d
        torch.nn.BatchNorm1d = lambda *sizes, **settings: nn.Identity()  # type: ignore
        found: Tensor = module.barlow_loss_func(one, two)
        torch.nn.BatchNorm1d = normalized  # type: ignore
        return found


class dino(nn.Module):
    """The center is a buffer, which all ranks must move alike."""

    def __init__(self) -> None:
        super().__init__()
        self.made = bare("solo.losses.dino").DINOLoss(
            num_prototypes=8, warmup_teacher_temp=1.0, teacher_temp=1.0,
            warmup_teacher_temp_epochs=0, num_epochs=1, student_temp=1.0,
        )  # fmt: skip

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        both = torch.cat([one, two])
        found: Tensor = self.made(both, both.detach())
        return found


class swav(nn.Module):
    """Assignments by Sinkhorn-Knopp over all ranks."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        kind = bare("solo.utils.sinkhorn_knopp").SinkhornKnopp
        assign = kind(epsilon=1.0, world_size=dist.get_world_size())
        views = [nn.functional.normalize(view, dim=1) for view in (one, two)]
        found: Tensor = bare("solo.losses.swav").swav_loss_func(
            views, [assign(view.detach()) for view in views], temperature=1.0
        )
        return found
