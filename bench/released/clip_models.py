"""Contrastive models of x-clip, CoCa-pytorch and musiclm-pytorch, which gather what they compare.

Encoders are left out: the features are what they would have made. A control is the same loss,
given the latents that were gathered before, in a model that does not gather by itself.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare, without
from gathering import Gather

_SIZES = {"dim_text": 8, "dim_image": 8, "dim_latent": 8}


class _Token(nn.Module):
    """What an encoder makes of one token: it is the features."""

    def forward(self, features: Tensor, *mask: Tensor) -> Tensor:
        return features.unsqueeze(1)


class x_clip(nn.Module):
    gathers = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        without("torchvision")
        kind = bare("x_clip.x_clip").CLIP
        self.made = kind(image_encoder=_Token(), text_encoder=_Token(),
                         text_encode_without_mask=True, **_SIZES)  # fmt: skip
        self.made.requires_all_gather = self.made.requires_all_gather and self.gathers

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(one, two, return_loss=True)
        return found


class x_clip_of_gathered(x_clip):
    gathers = False

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(Gather.apply(one), Gather.apply(two))


class coca(nn.Module):
    """Its contrastive part: the caption is of one token that counts for nothing."""

    gathers = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind = bare("coca_pytorch.coca_pytorch").CoCa
        self.made = kind(dim=8, num_tokens=9, unimodal_depth=1, multimodal_depth=1, heads=2,
                         dim_head=4, num_img_queries=2, caption_loss_weight=0.0)  # fmt: skip
        self.made.is_distributed = self.made.is_distributed and self.gathers

    def rows(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return features, labels

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        features, labels = self.rows(features, labels)
        text = torch.stack([labels + 1, labels.flip(0) % 3 + 1, labels + 1], 1)
        found: Tensor = self.made(text, image_tokens=features.unsqueeze(1), return_loss=True)
        return found


class coca_of_gathered(coca):
    gathers = False

    def rows(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        gathered: Any = Gather.apply(labels.to(features).unsqueeze(1))
        return Gather.apply(features), gathered.squeeze(1).long()


class musiclm_softmax(nn.Module):
    name = "SoftmaxContrastiveLearning"

    def __init__(self) -> None:
        super().__init__()
        without("torchaudio", "torchaudio.transforms", "audiolm_pytorch", "audiolm_pytorch.utils")
        without("x_clip", "x_clip.tokenizer", "vector_quantize_pytorch")
        sys.modules["x_clip.tokenizer"].tokenizer = SimpleNamespace(vocab_size=1)  # type: ignore
        module = bare("musiclm_pytorch.musiclm_pytorch")
        self.made = getattr(module, self.name)(init_temp=1)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        found: Tensor = self.made(*(nn.functional.normalize(view, dim=1) for view in (one, two)))
        return found


class musiclm_sigmoid(musiclm_softmax):
    name = "SigmoidContrastiveLearning"


class musiclm_softmax_of_gathered(musiclm_softmax):
    def __init__(self) -> None:
        super().__init__()
        self.made.all_gather.is_distributed = False

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return super().forward(Gather.apply(one), Gather.apply(two))
