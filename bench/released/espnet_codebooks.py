"""The codebook of espnet's codecs: a loss of what comes out of it, and its buffers.

Codes that are seldom used are not replaced here, since what replaces them is drawn.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare
from gathering import Gather

_WEIGHTS = torch.linspace(-1, 1, 8)


class codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        kind = bare("espnet2.gan_codec.shared.quantizer.modules.core_vq").EuclideanCodebook
        self.made = kind(8, 16, decay=0.8, threshold_ema_dead_code=0)

    def forward(self, features: Tensor) -> Tensor:
        chosen = self.made(features.unsqueeze(0))[0].squeeze(0)
        out = features + (chosen - features).detach()
        return (out.square() * _WEIGHTS.to(out)).mean() + (features - chosen).square().mean()


class codebook_of_gathered(codebook):
    """Given the samples of all ranks, and without what it exchanges: the control."""

    def __init__(self) -> None:
        super().__init__()
        self.made.all_reduce_fn = lambda *_: None

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(Gather.apply(features))
