"""Which samples a rank reads at a step.

Every rank has the indices that a DistributedSampler of its own gives it; a step takes as many of
them as the rank has positions in the step's stretch of the epoch. So the shards of a step, over all
ranks, are exactly the batch that one process would read, also when the batch does not divide by the
world: then shard sizes differ by one, and the sampler's padding is never read. Ranks without data
have no part in that: the others are counted from 0 as if they were all.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.utils.data import DistributedSampler

from distcheck.machine import seeds
from distcheck.training.epoch_positions import Stretch, stretch_of
from distcheck.training.loaded import LoadedWorkload


class Shards:
    """One rank's view of the data set, step by step; `rank` None is one that reads nothing."""

    def __init__(
        self,
        loaded: LoadedWorkload,
        *,
        size: int,
        batch: int,
        world: int,
        rank: int | None,
        seed: int,
    ) -> None:
        self._sampler = loaded.sampler
        self._size, self._batch, self._world, self._rank = size, batch, world, rank
        self._seed = seeds.derive(seed, "data order") % 2**31
        self._epoch, self._order = -1, list[int]()

    def read(self, step: int) -> tuple[Stretch, torch.Tensor]:
        """The step's stretch, and this rank's indices into the data set, int64 [n]."""
        stretch = stretch_of(step, size=self._size, batch=self._batch, world=self._world)
        if self._rank is None:
            return stretch, torch.empty(0, dtype=torch.int64)
        if stretch.epoch != self._epoch:
            self._epoch = stretch.epoch
            self._order = list(self._epoch_order(stretch.epoch, self._rank))
        ids = stretch.pick(self._order, self._world, self._rank)
        return stretch, torch.tensor(ids, dtype=torch.int64)

    def _epoch_order(self, epoch: int, rank: int) -> Sequence[int]:
        if self._sampler is not None:
            return self._sampler(self._size, self._world, rank, self._seed, epoch)
        return _order_of_all(self._size, self._seed, epoch)[rank :: self._world]


@lru_cache(maxsize=2)  # ranks that share a process draw it once
def _order_of_all(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    """A whole epoch in the order in which DistributedSampler deals it out."""
    sampler: DistributedSampler[int] = DistributedSampler(
        range(size),  # type: ignore[arg-type]
        num_replicas=1,
        rank=0,
        shuffle=True,
        seed=seed,
    )
    sampler.set_epoch(epoch)
    return tuple(sampler)
