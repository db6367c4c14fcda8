"""Gathers with a gradient: one of our own, for controls, and torch's, made right on gloo."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor


class Gather(torch.autograd.Function):
    """The rows of all ranks; backward adds up what each of them has of one's own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def gathers_contiguously() -> None:
    """Wraps what torch gathers, once: on gloo it mixes up gradients that lie otherwise."""
    gather = torch.distributed.nn.all_gather
    if getattr(gather, "contiguous", False):
        return

    def contiguous(rows: Tensor, *more: Any) -> Any:
        return tuple(_Contiguous.apply(part) for part in gather(rows, *more))

    contiguous.contiguous = True  # type: ignore[attr-defined]
    torch.distributed.nn.all_gather = contiguous
