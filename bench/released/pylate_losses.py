"""The contrastive loss of PyLate, on given token embeddings: a sample has two tokens of four."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare, without
from gathering import Gather, gathers_contiguously


class _Embeds(nn.Module):
    skiplist: tuple[int, ...] = ()
    do_query_expansion = True

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"token_embeddings": features["embedding"].view(-1, 2, 4)}


class _AllTokens:
    """No token is skipped."""

    @staticmethod
    def skiplist_mask(input_ids: Tensor, skiplist: Any) -> Tensor:
        return torch.ones_like(input_ids, dtype=torch.bool)


class _Contrastive(nn.Module):
    settings: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        without("pylate.models", "datasets", "tqdm", "transformers", "sentence_transformers")
        sys.modules["pylate.models"].ColBERT = _AllTokens  # type: ignore[attr-defined]
        kind = bare("pylate.losses.contrastive").Contrastive
        self.made = kind(_Embeds(), **self.settings)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        features = [
            {
                "embedding": view,
                "input_ids": torch.ones(len(view), 2, dtype=torch.long),
                "attention_mask": torch.ones(len(view), 2, dtype=torch.long),
            }
            for view in (one, two)
        ]
        found: Tensor = self.made(features)
        return found


class gathers(_Contrastive):
    """With its switch."""

    settings = {"gather_across_devices": True}

    def __init__(self) -> None:
        super().__init__()
        gathers_contiguously()


class gathers_without_factor(gathers):
    """The same, divided by the number of ranks again: the control."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(one, two) / torch.distributed.get_world_size()


class of_gathered(_Contrastive):
    """Without its switch, given what was gathered before."""

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(Gather.apply(one), Gather.apply(two))
