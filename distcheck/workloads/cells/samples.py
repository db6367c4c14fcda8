"""What cells train on and with: small images made from a hash, cross-entropy, SGD with momentum."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.workloads.datasets.synthetic import hash24

SHAPE = (3, 8, 8)
FEATURES = 3 * 8 * 8
_CLASSES = 4
_TEST_OFFSET = 1 << 40


class CellSamples:
    """`size` images of 3x8x8 with values in [-1, 1), four classes; the test split has as many."""

    shape = SHAPE
    classes = _CLASSES

    def __init__(self, size: int = 1024) -> None:
        self._size = size

    def size(self, *, train: bool) -> int:
        """As many as it was made with."""
        return self._size

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [n, 3, 8, 8] in `dtype`, labels [n] int64; the same bits in every process."""
        rows = ids if train else ids + _TEST_OFFSET
        keys = rows.unsqueeze(1) * 1009 + torch.arange(FEATURES)
        images = hash24(keys).to(torch.float32).div_(2**23).sub_(1.0)
        return images.to(dtype).view(-1, *SHAPE), hash24(rows * 8191 + 1) % _CLASSES


class CellWorkload:
    """What cells have in common: only `model` is left to them."""

    def samples(self) -> CellSamples:
        """Data of their own, in place of `--data`."""
        return CellSamples()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross-entropy, the mean over the shard."""
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD, learning rate 0.05, momentum 0.9: what was applied before shows later."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
