"""Contrastive losses of open_clip, each as its own training script makes it."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare


class _Scaled(nn.Module):
    """The scale and the bias are the model's, and learned."""

    def __init__(self, name: str, *, bias: bool = False, **settings: Any) -> None:
        super().__init__()
        kind = getattr(bare("open_clip.loss"), name)
        ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        self.made = kind(**settings, **ranks)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.tensor(-1.0)) if bias else None

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = (nn.functional.normalize(view, dim=1) for view in (image, text))
        bias = () if self.bias is None else (self.bias,)
        found: Tensor = self.made(image, text, self.scale.exp(), *bias)
        return found


def clip_local() -> nn.Module:
    return _Scaled("ClipLoss", local_loss=True, gather_with_grad=True)


def clip_global() -> nn.Module:
    return _Scaled("ClipLoss", gather_with_grad=True)


def clip_without_gradient() -> nn.Module:
    return _Scaled("ClipLoss")


def clip_local_without_gradient() -> nn.Module:
    return _Scaled("ClipLoss", local_loss=True)


def clip_biased() -> nn.Module:
    return _Scaled("ClipLoss", bias=True, local_loss=True, gather_with_grad=True)


def siglip_bidir() -> nn.Module:
    return _Scaled("SigLipLoss", bias=True, dist_impl="bidir")


def siglip_shift() -> nn.Module:
    return _Scaled("SigLipLoss", bias=True, dist_impl="shift")


def siglip_reduce() -> nn.Module:
    return _Scaled("SigLipLoss", bias=True, dist_impl="reduce")


def siglip_gather() -> nn.Module:
    return _Scaled("SigLipLoss", bias=True, dist_impl="gather")


class distill(_Scaled):
    """The student's features are given, and the teacher's are the same the other way round."""

    def __init__(self) -> None:
        super().__init__("DistillClipLoss", local_loss=True, gather_with_grad=True)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        image, text = (nn.functional.normalize(view, dim=1) for view in (image, text))
        scale = self.scale.exp()
        parts = self.made(image, text, scale, text.detach(), image.detach(), scale.detach())
        return parts[0] + parts[1]
