"""Losses of sentence-transformers that gather across devices, on embeddings that are given.

What was gathered gets a gradient that lies in memory as it was gathered: torch's own gather mixes
up others on gloo, which is not what is looked at.
"""

from typing import Any

import torch
import torch.distributed.nn
from sentence_transformers import losses
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase


class _Words(PreTrainedTokenizerBase):
    def __init__(self) -> None:
        pass

    def get_vocab(self) -> dict[str, int]:
        return {}


class _Embeds(nn.Module):
    """A model whose embeddings are the features; a guide sees them by other weights."""

    max_seq_length = 8

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.tokenizer = _Words()
        drawn = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed or 0))
        self.weights = None if seed is None else drawn

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        embedding = features["embedding"]
        if self.weights is not None:
            embedding = embedding @ self.weights.to(embedding)
        return {"sentence_embedding": embedding}


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def _gathers_contiguously() -> None:
    """Wraps what torch gathers, once."""
    gather = torch.distributed.nn.all_gather
    if getattr(gather, "contiguous", False):
        return

    def contiguous(rows: Tensor, *more: Any) -> Any:
        return tuple(_Contiguous.apply(part) for part in gather(rows, *more))

    contiguous.contiguous = True  # type: ignore[attr-defined]
    torch.distributed.nn.all_gather = contiguous


class _Pairs(nn.Module):
    def __init__(self, name: str, *guides: nn.Module, **settings: Any) -> None:
        super().__init__()
        _gathers_contiguously()
        self.made = getattr(losses, name)(
            _Embeds(), *guides, gather_across_devices=True, **settings
        )

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        features = [{"embedding": one}, {"embedding": two}]
        found: Tensor = self.made(features, torch.zeros(len(one)))
        return found


_ALONE = {"contrast_anchors": False, "contrast_positives": False}


def gist() -> nn.Module:
    return _Pairs("GISTEmbedLoss", _Embeds(3), temperature=1.0, **_ALONE)


def gist_positives() -> nn.Module:
    return _Pairs("GISTEmbedLoss", _Embeds(3), temperature=1.0, contrast_anchors=False)


def gist_anchors() -> nn.Module:
    return _Pairs("GISTEmbedLoss", _Embeds(3), temperature=1.0)


def ranking() -> nn.Module:
    return _Pairs("MultipleNegativesRankingLoss", scale=1.0)


def symmetric_ranking() -> nn.Module:
    return _Pairs("MultipleNegativesSymmetricRankingLoss", scale=1.0)


def all_directions() -> nn.Module:
    ways = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    return _Pairs("MultipleNegativesRankingLoss", scale=1.0, directions=ways)
