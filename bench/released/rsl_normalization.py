"""Running statistics of rsl-rl, which normalize what a policy sees: a metric of two results.

All ranks have the same number of samples here, and so call `update` equally often.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare


class observations:
    """Mean and standard deviation of all samples seen."""

    def __init__(self) -> None:
        self._made = bare("rsl_rl.modules.normalization").EmpiricalNormalization(8)

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._made.update(features)

    def compute(self) -> Tensor:
        return torch.cat([self._made.mean, self._made.std])


class of_gathered(observations):
    """The same, given the samples of all ranks: the control."""

    def update(self, features: Tensor, labels: Tensor) -> None:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        super().update(torch.cat(parts), labels)


class returns(observations):
    """Of discounted rewards: those of a sample follow one another in a rank."""

    def __init__(self) -> None:
        module = bare("rsl_rl.modules.normalization")
        self._rewards = module.EmpiricalDiscountedVariationNormalization((), gamma=0.5)
        self._made = self._rewards.emp_norm

    def update(self, features: Tensor, labels: Tensor) -> None:
        for column in features.T[:3]:
            self._rewards(column)
        self._rewards.disc_avg.avg = None

    def compute(self) -> Tensor:
        return torch.stack([self._made.mean.squeeze(), self._made.std.squeeze()])
