"""Positions of an epoch that a step covers, by rank. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochSegment:
    """A step's part of the epoch: positions [first, first + count). Position p belongs to rank p
    mod W, as in torch's DistributedSampler.
    """

    epoch: int
    first: int
    count: int

    def shard_size(self, world: int, rank: int) -> int:
        """Return the number of positions of a rank: those congruent to `rank` modulo `world`."""
        return len(self._positions_of(world, rank))

    def _positions_of(self, world: int, rank: int) -> range:
        begin = -(-(self.first - rank) // world)
        end = -(-(self.first + self.count - rank) // world)
        return range(max(begin, 0), max(end, 0))

    def pick(self, order: Sequence[int], world: int, rank: int) -> list[int]:
        """Return the rank's indices for this step, from its order for the whole epoch."""
        return [order[turn] for turn in self._positions_of(world, rank)]


def steps_per_epoch(size: int, batch: int, world: int) -> int:
    """Return the steps per epoch. A last batch that is too small for every rank is dropped."""
    full, rest = divmod(size, batch)
    return full + (rest >= world)


def epoch_segment_of_step(step: int, *, size: int, batch: int, world: int) -> EpochSegment:
    """Return the part of an epoch that global step `step` covers."""
    epoch, within = divmod(step, steps_per_epoch(size, batch, world))
    first = within * batch
    return EpochSegment(epoch, first, min(batch, size - first))


def shard_sizes(steps: int, *, size: int, batch: int, world: int) -> list[list[int]]:
    """Return the number of samples that each rank reads, for each step."""
    stretches = (
        epoch_segment_of_step(step, size=size, batch=batch, world=world) for step in range(steps)
    )
    return [[s.shard_size(world, rank) for rank in range(world)] for s in stretches]
