"""Which rank reads which samples."""

from collections.abc import Sequence

import torch

from . import mutant
from .small import Points, Small


@mutant(kind="workload", caught="data", world=2, steps=2, step=1, seldom=True)
class GeneratorOfEachRanksOwn(Small):
    """The shuffle draws from the process's own generator, which every rank has seeded otherwise."""

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        return torch.randperm(size).tolist()


class _Odd(Points):
    def size(self, *, train: bool) -> int:
        return 511


@mutant(kind="workload", caught="data", world=2, steps=2)
class SplitsOverlap(Small):
    """An odd number of samples is split in halves that are rounded up: one is in both."""

    def samples(self) -> Points:
        return _Odd()

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        each = -(-size // world)
        first = min(rank * each, size - each)
        part = torch.arange(first, first + each)
        return part.flip(0).tolist() if rank == 0 else part.tolist()


class _TwoSteps(Points):
    def size(self, *, train: bool) -> int:
        return 512


@mutant(kind="workload", caught="data", world=2, steps=2, step=1)
class ShardedTwice(Small):
    """A shard of what is a shard already: half of it is never read, the other half comes again."""

    def samples(self) -> Points:
        return _TwoSteps()

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        own = range(rank, size, world)[rank::world]
        return [*own, *own]
