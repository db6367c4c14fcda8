"""By world: arithmetic that is right at a world of 4, or at powers of two only."""

import math

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step

from . import subtle

SMALL = ".witnesses:Plain"


def _swap(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    other = torch.empty_like(tensor)
    for work in [dist.isend(tensor.clone(), peer), dist.irecv(other, peer)]:
        work.wait()
    return other


@subtle(needs="a world that is not a power of two", witness=SMALL, reach="worlds", world=3,
        after="apex 89ae9e5")  # fmt: skip
def hypercube(model: nn.Module, step: Step) -> None:
    """Pairs along the bits of a rank: a peer beyond the world is left out."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        mask = 1
        while mask < step.world_size:
            peer = step.rank ^ mask
            if peer < step.world_size:
                parameter.grad.add_(_swap(parameter.grad, peer))
            mask *= 2


@subtle(needs="a world that is not a power of two", witness=SMALL, reach="worlds", world=3,
        after="pytorch #155903")  # fmt: skip
def halves_at_every_level(model: nn.Module, step: Step) -> None:
    """The mean is formed by halving once for each level of a tree."""
    levels = int(math.log2(step.world_size))
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.mul_(0.5**levels)


@subtle(needs="unequal shards: a world that does not divide the batch", witness=SMALL,
        reach="worlds", world=3, after="pytorch #37359, transformers #608")  # fmt: skip
def ranks_count_alike(model: nn.Module, step: Step) -> None:
    """A mean over ranks, where one over samples is meant."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(step.world_size)


@subtle(needs="unequal shards", witness=SMALL, reach="worlds", world=3,
        after="transformers #34191, #34242")  # fmt: skip
def whole_division_of_the_batch(model: nn.Module, step: Step) -> None:
    """A rank's samples are the batch divided by the world, without the rest."""
    each = step.total_samples // step.world_size
    for parameter in model.parameters():
        parameter.grad.mul_(step.samples)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(each * step.world_size)


@subtle(needs="an odd world", witness=SMALL, reach="worlds", world=3, after="VeOmni #1115")
class PairsOfRanks:
    """Machines of two ranks: the third one of three is on none, and exchanges with nobody."""

    def wrap(self, model: nn.Module) -> nn.Module:
        world = dist.get_world_size()
        pairs = [[r, r + 1] for r in range(0, world - 1, 2)]
        alone = [[r] for r in range(len(pairs) * 2, world)]
        self.pair, _ = dist.new_subgroups_by_enumeration(pairs + alone)
        self.leaders = dist.new_group([pair[0] for pair in pairs])
        return model

    def sync(self, model: nn.Module, step: Step) -> None:
        first = step.rank - step.rank % 2
        for parameter in model.parameters():
            parameter.grad.mul_(step.weight / step.world_size)
            dist.all_reduce(parameter.grad, group=self.pair)
            if step.rank == first and step.rank + 1 < step.world_size:
                dist.all_reduce(parameter.grad, group=self.leaders)
            if first + 1 < step.world_size:
                dist.broadcast(parameter.grad, first, group=self.pair)


@subtle(needs="a world over 4", witness=SMALL, reach="worlds", world=5, after="apex 89ae9e5")
def neighbors_and_opposite(model: nn.Module, step: Step) -> None:
    """A rank adds up its own, its two neighbors' and the opposite one's: all, at 4."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        found = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(found, parameter.grad)
        wanted = {(step.rank + by) % step.world_size for by in (-1, 0, 1, step.world_size // 2)}
        parameter.grad.copy_(sum(found[rank] for rank in sorted(wanted)))


@subtle(needs="a world over 4", witness=SMALL, reach="worlds", world=5, after="DeepSpeed #5555")
def four_to_a_machine(model: nn.Module, step: Step) -> None:
    """Divides by the ranks of a machine, of which there are four at most."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight)
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(min(step.world_size, 4))


@subtle(needs="a world that is not a power of two", witness=SMALL, reach="worlds", world=6,
        after="Megatron-LM #2218")  # fmt: skip
def tree(model: nn.Module, step: Step) -> None:
    """A binary tree of as many levels as two goes into the world: at 6, ranks 4 and 5 are lost."""
    levels = int(math.log2(step.world_size))
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        for span in [2**level for level in range(levels)]:
            if step.rank % (2 * span) == 0 and step.rank + span < step.world_size:
                other = torch.empty_like(parameter.grad)
                dist.recv(other, step.rank + span)
                parameter.grad.add_(other)
            elif step.rank % (2 * span) == span:
                dist.send(parameter.grad, step.rank - span)
        dist.broadcast(parameter.grad, 0)


@subtle(needs="a world that is not even", witness=SMALL, reach="worlds", world=5,
        after="pytorch #176076")  # fmt: skip
def two_halves_of_the_world(model: nn.Module, step: Step) -> None:
    """The halves of the world send each other their sums; of five ranks the fifth sends alone."""
    half = step.world_size // 2
    for parameter in model.parameters():
        found = [torch.empty_like(parameter.grad) for _ in range(step.world_size)]
        dist.all_gather(found, parameter.grad * step.weight)
        low, high = found[:half], found[half : 2 * half]
        both = (torch.stack(low).sum(0) + torch.stack(high).sum(0)) / (2 * half)
        parameter.grad.copy_(both)


@subtle(needs="a world over 4", witness=SMALL, reach="worlds", world=5)
def tags_modulo_four(model: nn.Module, step: Step) -> None:
    """Rank 0 keeps what it gets in four slots, by the sender modulo 4."""
    for parameter in model.parameters():
        parameter.grad.mul_(step.weight / step.world_size)
        slots = [torch.zeros_like(parameter.grad) for _ in range(4)]
        if step.rank == 0:
            slots[0].copy_(parameter.grad)
            for rank in range(1, step.world_size):
                dist.recv(slots[rank % 4], rank)
            parameter.grad.copy_(torch.stack(slots).sum(0))
        else:
            dist.send(parameter.grad, 0)
        dist.broadcast(parameter.grad, 0)
