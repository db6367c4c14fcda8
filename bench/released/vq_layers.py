"""Quantizers of vector-quantize-pytorch: a loss of what comes out of them, and their buffers."""

from collections.abc import Callable
from typing import Any

import torch
import vector_quantize_pytorch as vq
from torch import Tensor, nn

_WEIGHTS = torch.linspace(-1, 1, 8)


class _Quantized(nn.Module):
    """The loss is of what comes out, with the quantizer's own loss where it has one."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, features: Tensor) -> Tensor:
        out = self.layer(features.unsqueeze(0))
        quantized, *more = out if isinstance(out, tuple) else (out,)
        total = (quantized.squeeze(0).square() * _WEIGHTS.to(quantized)).mean()
        own = [one for one in more if isinstance(one, Tensor) and one.is_floating_point()]
        return total + sum(one.mean() for one in own)


def _codebook(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: _Quantized(lambda: vq.VectorQuantize(dim=8, codebook_size=16, **settings))


ema = _codebook(decay=0.8)
ema_cosine = _codebook(decay=0.8, use_cosine_sim=True)
ema_heads = _codebook(decay=0.8, heads=2, separate_codebook_per_head=True, codebook_dim=4)
ema_projected = _codebook(decay=0.8, codebook_dim=4)
learnable = _codebook(learnable_codebook=True, ema_update=False)
no_rotation = _codebook(decay=0.8, rotation_trick=False)


def lfq() -> nn.Module:
    return _Quantized(lambda: vq.LFQ(dim=8, codebook_size=16, entropy_loss_weight=1.0))


def lfq_without_entropy() -> nn.Module:
    return _Quantized(lambda: vq.LFQ(dim=8, codebook_size=16, entropy_loss_weight=0.0))


def lfq_spherical() -> nn.Module:
    return _Quantized(
        lambda: vq.LFQ(dim=8, codebook_size=16, entropy_loss_weight=1.0, spherical=True)
    )


def residual_lfq() -> nn.Module:
    return _Quantized(lambda: vq.ResidualLFQ(dim=8, codebook_size=16, num_quantizers=2))


def residual_vq() -> nn.Module:
    return _Quantized(lambda: vq.ResidualVQ(dim=8, codebook_size=16, num_quantizers=2, decay=0.8))


def sim_vq() -> nn.Module:
    return _Quantized(lambda: vq.SimVQ(dim=8, codebook_size=16))


def residual_sim_vq() -> nn.Module:
    return _Quantized(lambda: vq.ResidualSimVQ(dim=8, codebook_size=16, num_quantizers=2))


def fsq() -> nn.Module:
    return _Quantized(lambda: vq.FSQ(dim=8, levels=[4, 4, 4]))


def hierarchical() -> nn.Module:
    return _Quantized(lambda: vq.HierarchicalVQ(dim=8, codebook_size=16))


class in_place:
    """A codebook that the layer's own optimizer moves in the forward pass: a metric whose result
    is the codebook after one pass over all samples of a rank.
    """

    settings: dict[str, Any] = {
        "learnable_codebook": True, "ema_update": False,
        "in_place_codebook_optimizer": lambda ones: torch.optim.SGD(ones, lr=0.5),
    }  # fmt: skip

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._seen.append(features)

    def compute(self) -> Tensor:
        before = torch.get_rng_state()
        torch.manual_seed(1)
        layer = vq.VectorQuantize(dim=8, codebook_size=16, threshold_ema_dead_code=0,
                                  **self.settings)  # fmt: skip
        torch.set_rng_state(before)
        with torch.enable_grad():
            layer(torch.cat(self._seen).unsqueeze(0))
        codebook: Tensor = layer.codebook.detach()
        return codebook.flatten()


class moved_by_average(in_place):
    """The codebook that is an average over what was seen."""

    settings = {"decay": 0.8}
