"""Losses of sentence-transformers that gather across devices, on embeddings that are given.

What was gathered gets a gradient that lies in memory as it was gathered: torch's own gather mixes
up others on gloo, which is not what is looked at.
"""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare, without
from gathering import gathers_contiguously

_PLACE = "sentence_transformers.sentence_transformer"


class _Words:
    """A tokenizer, which the losses ask for its words alone."""

    def get_vocab(self) -> dict[str, int]:
        return {}


def _loss(file: str, name: str) -> Any:
    """A class of a file of losses; models, and what they need, are left out."""
    without("transformers", "transformers.utils", f"{_PLACE}.model", f"{_PLACE}.modules")
    sys.modules["transformers"].PreTrainedTokenizerBase = _Words  # type: ignore[attr-defined]
    shown = SimpleNamespace(get_logger=logging.getLogger)
    sys.modules["transformers.utils"].logging = shown  # type: ignore[attr-defined]
    gathering = bare("sentence_transformers.util.distributed")
    for shared in ("all_gather_with_grad", "is_dist_initialized", "get_rank"):
        found = getattr(gathering, shared, None)
        setattr(sys.modules["sentence_transformers.util"], shared, found)
    return getattr(bare(f"{_PLACE}.losses.{file}"), name)


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


class _Pairs(nn.Module):
    def __init__(self, file: str, name: str, *guides: nn.Module, **settings: Any) -> None:
        super().__init__()
        gathers_contiguously()
        kind = _loss(file, name)
        self.made = kind(_Embeds(), *guides, gather_across_devices=True, **settings)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        features = [{"embedding": one}, {"embedding": two}]
        found: Tensor = self.made(features, torch.zeros(len(one)))
        return found


_ALONE = {"contrast_anchors": False, "contrast_positives": False}


def gist() -> nn.Module:
    return _Pairs("gist_embed", "GISTEmbedLoss", _Embeds(3), temperature=1.0, **_ALONE)


def gist_positives() -> nn.Module:
    return _Pairs(
        "gist_embed", "GISTEmbedLoss", _Embeds(3), temperature=1.0, contrast_anchors=False
    )


def gist_anchors() -> nn.Module:
    return _Pairs("gist_embed", "GISTEmbedLoss", _Embeds(3), temperature=1.0)


class gist_without_suppression(_Pairs):
    """A margin below which nothing is suppressed: the control."""

    def __init__(self) -> None:
        super().__init__("gist_embed", "GISTEmbedLoss", _Embeds(3), temperature=1.0, margin=-3.0,
                         margin_strategy="absolute", **_ALONE)  # fmt: skip
