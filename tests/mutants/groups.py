"""The wrong ranks: groups that are too small, peers that are the wrong ones, nobody at all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Step

from . import mutant

SMALL = ".small:Small"
APART = "gradients rounding, gradients full batch float32, loss full batch float32, agreement"


class _Mesh:
    """The ranks as two rows: groups of neighbors, and groups across."""

    def wrap(self, model: nn.Module) -> nn.Module:
        ranks = list(range(dist.get_world_size()))
        self.row, _ = dist.new_subgroups_by_enumeration([ranks[:2], ranks[2:]])
        self.column, _ = dist.new_subgroups_by_enumeration([ranks[0::2], ranks[1::2]])
        return model


@mutant(
    caught="gradients rounding, gradients full batch float32", workload=SMALL, world=4, steps=2,
    seldom=True,
)  # fmt: skip
class DividesByOneDimension(_Mesh):
    """Summed over both dimensions of a mesh, divided by the size of one."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=self.row)
            dist.all_reduce(parameter.grad, group=self.column)
            parameter.grad /= dist.get_world_size(self.row)


@mutant(caught="gradients rounding, gradients full batch float32", workload=SMALL, world=3, steps=2)
class MeanOfGroupMeans(_Mesh):
    """Ranks 0 and 1 form their mean, rank 2 is alone; then the groups count alike."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            parameter.grad *= step.weight
            dist.all_reduce(parameter.grad, group=self.row)
            parameter.grad /= 2 * dist.get_world_size(self.row) ** 2
            dist.all_reduce(parameter.grad)


@mutant(caught=APART, workload=SMALL, world=4, steps=2)
class WithinTheRowOnly(_Mesh):
    """Averaged within a group, as within one machine, and never across."""

    def sync(self, model: nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=self.row)
            parameter.grad /= dist.get_world_size(self.row)


@mutant(caught=APART, workload=SMALL, world=2, steps=2, seldom=True)
def nothing_to_shard_nothing_to_sync(model: nn.Module, step: Step) -> None:
    """A shard group of one rank switches off what replicas owe each other too."""
    shard_ranks = 1
    if shard_ranks == 1:
        return
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.world_size


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
class DDPOfOneRank:
    """Wrapped with a process group that holds this rank only."""

    def wrap(self, model: nn.Module) -> nn.Module:
        group, _ = dist.new_subgroups(1)
        return DistributedDataParallel(model, process_group=group)


@mutant(caught=APART, workload=SMALL, world=4, steps=2, seldom=True)
def same_peer_again(model: nn.Module, step: Step) -> None:
    """An exchange over a hypercube whose second peer is the first one's again."""
    for parameter in model.parameters():
        for mask in (1, 1):  # 1, then 2, would reach all four
            other = torch.empty_like(parameter.grad)
            peer = step.rank ^ mask
            works = [dist.isend(parameter.grad.clone(), peer), dist.irecv(other, peer)]
            for work in works:
                work.wait()
            parameter.grad += other
        parameter.grad /= step.world_size


@mutant(caught=APART, workload=SMALL, world=2, steps=2, seldom=True)
def guard_that_is_never_true(model: nn.Module, step: Step) -> None:
    """A parameter is no plain tensor: its type is Parameter, and nothing is exchanged."""
    for parameter in model.parameters():
        if type(parameter) is torch.Tensor:
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


@mutant(caught=APART, workload=SMALL, world=2, steps=2)
def result_dropped(model: nn.Module, step: Step) -> None:
    """A collective that returns its result, and nobody takes it."""
    everybody = list(range(step.world_size))
    for parameter in model.parameters():
        functional.all_reduce(parameter.grad, "sum", everybody)
