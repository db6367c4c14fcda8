"""Losses of pytorch-metric-learning within its DistributedLossWrapper."""

from typing import Any

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

_PROXIES = {"num_classes": 8, "embedding_size": 8}


def _wrapped(name: str, **settings: Any) -> torch.nn.Module:
    return _Labeled(getattr(losses, name)(**settings))


class _Labeled(torch.nn.Module):
    """The first releases take labels on the device of the embeddings only."""

    def __init__(self, loss: torch.nn.Module, **how: Any) -> None:
        super().__init__()
        self.made = DistributedLossWrapper(loss, **how)

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.made(embeddings, labels)
        return found


def contrastive() -> torch.nn.Module:
    return _wrapped("ContrastiveLoss")


def ntxent() -> torch.nn.Module:
    return _wrapped("NTXentLoss")


def supcon() -> torch.nn.Module:
    return _wrapped("SupConLoss")


def multisimilarity() -> torch.nn.Module:
    return _wrapped("MultiSimilarityLoss")


def triplet() -> torch.nn.Module:
    return _wrapped("TripletMarginLoss")


def circle() -> torch.nn.Module:
    return _wrapped("CircleLoss")


def lifted() -> torch.nn.Module:
    return _wrapped("GeneralizedLiftedStructureLoss")


def intrapair() -> torch.nn.Module:
    return _wrapped("IntraPairVarianceLoss")


def margin() -> torch.nn.Module:
    return _wrapped("MarginLoss")


def npairs_signal() -> torch.nn.Module:
    return _wrapped("SignalToNoiseRatioContrastiveLoss")


def fast_ap() -> torch.nn.Module:
    return _wrapped("FastAPLoss")


def tuplet() -> torch.nn.Module:
    return _wrapped("TupletMarginLoss")


def neighborhood() -> torch.nn.Module:
    return _wrapped("NCALoss")


def proxy_anchor() -> torch.nn.Module:
    return _wrapped("ProxyAnchorLoss", **_PROXIES)


def proxy_nca() -> torch.nn.Module:
    return _wrapped("ProxyNCALoss", **_PROXIES)


def arcface() -> torch.nn.Module:
    return _wrapped("ArcFaceLoss", **_PROXIES)


def cosface() -> torch.nn.Module:
    return _wrapped("CosFaceLoss", **_PROXIES)


def soft_triple() -> torch.nn.Module:
    return _wrapped("SoftTripleLoss", **_PROXIES)


def normalized_softmax() -> torch.nn.Module:
    return _wrapped("NormalizedSoftmaxLoss", **_PROXIES)


def efficient_contrastive() -> torch.nn.Module:
    return _Labeled(losses.ContrastiveLoss(), efficient=True)


def efficient_ntxent() -> torch.nn.Module:
    return _Labeled(losses.NTXentLoss(), efficient=True)


def efficient_triplet() -> torch.nn.Module:
    return _Labeled(losses.TripletMarginLoss(), efficient=True)
