"""How many steps opacus' distributed Poisson sampler gives a rank, as a metric."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from bare import bare


class steps_of_few_samples:
    """A rank often draws none of its samples in a step: that step is one of its own as well."""

    rate = 0.1

    def __init__(self) -> None:
        self._seen = 0

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._seen += len(features)

    def compute(self) -> Tensor:
        kind = bare("opacus.utils.uniform_sampler").DistributedUniformWithReplacementSampler
        seen = torch.tensor(self._seen)
        dist.all_reduce(seen)
        drawn = torch.Generator().manual_seed(dist.get_rank())
        sampler = kind(total_size=64, sample_rate=self.rate, steps=20, generator=drawn)
        return torch.stack([torch.tensor(len(list(sampler))), seen]).float()


class steps_of_many_samples(steps_of_few_samples):
    """A rank that draws none is next to never seen: the control."""

    rate = 0.9
