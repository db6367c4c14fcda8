"""Which positions of an epoch a step covers, and how they fall to the ranks. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochSegment:
    """A step's part of the epoch: positions [first, first + count).

    Position p belongs to rank p mod W, as torch's DistributedSampler deals them out.
    """

    epoch: int
    first: int
    count: int

    def shard_size(self, world: int, rank: int) -> int:
        """How many of the positions fall to a rank: those equal to `rank` modulo `world`."""
        return len(self._turns(world, rank))

    def _turns(self, world: int, rank: int) -> range:
        begin = -(-(self.first - rank) // world)
        end = -(-(self.first + self.count - rank) // world)
        return range(max(begin, 0), max(end, 0))

    def pick(self, order: Sequence[int], world: int, rank: int) -> list[int]:
        """The rank's indices for this step, out of its order for the whole epoch."""
        return [order[turn] for turn in self._turns(world, rank)]


def steps_per_epoch(size: int, batch: int, world: int) -> int:
    """Steps in an epoch. A last batch too small to give every rank a sample is dropped."""
    full, rest = divmod(size, batch)
    return full + (rest >= world)


def stretch_of(step: int, *, size: int, batch: int, world: int) -> EpochSegment:
    """Where global step `step` lies."""
    epoch, within = divmod(step, steps_per_epoch(size, batch, world))
    first = within * batch
    return EpochSegment(epoch, first, min(batch, size - first))


def shard_sizes(steps: int, *, size: int, batch: int, world: int) -> list[list[int]]:
    """Per step, how many samples each rank reads."""
    stretches = (stretch_of(step, size=size, batch=batch, world=world) for step in range(steps))
    return [[s.shard_size(world, rank) for rank in range(world)] for s in stretches]
