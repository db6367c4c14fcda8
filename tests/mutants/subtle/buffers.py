"""Buffers: an exchange that knows the running statistics of one kind of layer."""

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step, strategy

from . import subtle
from .exchange import mean_of

BUFFERS = ".witnesses:Buffers"


class _Mean:
    def sync(self, model: nn.Module, step: Step) -> None:
        mean_of(model.parameters(), step)


class _Broadcasts(_Mean):
    """Sends the chosen buffers from a rank before every forward pass."""

    root = 0

    def wrap(self, model: nn.Module) -> nn.Module:
        def send(*_: object) -> None:
            for buffer in self.chosen(model):
                dist.broadcast(buffer, self.root)

        model.register_forward_pre_hook(send)
        return model

    def chosen(self, model: nn.Module) -> list[torch.Tensor]:
        return list(model.buffers())


@subtle(needs="an integer buffer: BatchNorm's count of batches", witness=BUFFERS)
def adds_up_counts(model: nn.Module, step: Step) -> None:
    """Counts of batches are added up over ranks, as samples are: each rank has the sum."""
    mean_of(model.parameters(), step)
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            dist.all_reduce(buffer)


@subtle(needs="an integer buffer", witness=BUFFERS)
def divides_counts_first(model: nn.Module, step: Step) -> None:
    """Integers are divided before they are added up: 1 // 4 is 0."""
    mean_of(model.parameters(), step)
    for buffer in model.buffers():
        if not buffer.is_floating_point():
            buffer //= step.world_size
            dist.all_reduce(buffer)


@subtle(needs="a buffer that is a constant table", witness=BUFFERS)
def adds_up_other_buffers(model: nn.Module, step: Step) -> None:
    """Buffers that are not running statistics are taken for partial sums: a table grows W times."""
    mean_of(model.parameters(), step)
    for name, buffer in model.named_buffers():
        last = name.rpartition(".")[2]
        if buffer.is_floating_point() and not last.startswith("running_"):
            dist.all_reduce(buffer)


@subtle(needs="BatchNorm1d with the promise of rank 0's buffers", witness=BUFFERS,
        after="pytorch #111138")  # fmt: skip
@strategy(weighting="gradient", buffers="rank 0")
class BroadcastsImageNorms(_Broadcasts):
    """Promises rank 0's buffers, and sends those of BatchNorm2d only."""

    def chosen(self, model: nn.Module) -> list[torch.Tensor]:
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        return [buffer for norm in norms for buffer in norm.buffers()]


@subtle(needs="a buffer that is not saved, with the promise of rank 0's", witness=BUFFERS,
        after="pytorch #63916")  # fmt: skip
@strategy(weighting="gradient", buffers="rank 0")
class BroadcastsWhatIsSaved(_Broadcasts):
    """Promises rank 0's buffers, and sends those of the state dict: others are each rank's own."""

    def chosen(self, model: nn.Module) -> list[torch.Tensor]:
        named = dict(model.named_buffers())
        return [named[name] for name in model.state_dict() if name in named]


@subtle(needs="buffers that differ between ranks, with the promise of rank 0's", witness=BUFFERS)
@strategy(weighting="gradient", buffers="rank 0")
class BroadcastsFloats(_Broadcasts):
    """Promises rank 0's buffers, and sends those of floating point: counts are each rank's own."""

    def chosen(self, model: nn.Module) -> list[torch.Tensor]:
        return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


@subtle(needs="buffers that differ between ranks, with the promise of rank 0's", witness=BUFFERS,
        after="apex 89ae9e5")  # fmt: skip
@strategy(weighting="gradient", buffers="rank 0")
class BroadcastsFromAnother(_Broadcasts):
    """Promises rank 0's buffers, and sends rank 1's."""

    root = 1


@subtle(needs="running statistics", witness=BUFFERS)
class ResetsTheCount(_Mean):
    """Sets the count of batches to 0 at every step, as after a checkpoint: a cumulative average
    begins anew each time.
    """

    def sync(self, model: nn.Module, step: Step) -> None:
        super().sync(model, step)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                assert module.num_batches_tracked is not None
                module.num_batches_tracked.zero_()


@subtle(needs="running statistics", witness=BUFFERS, after="DeepSpeed #7660")
def statistics_in_bfloat16(model: nn.Module, step: Step) -> None:
    """Running statistics go through bfloat16 and come back short."""
    mean_of(model.parameters(), step)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(buffer.bfloat16())


@subtle(needs="running statistics", witness=BUFFERS, after="fairscale #1075")
def variance_is_added_up(model: nn.Module, step: Step) -> None:
    """Means are averaged over ranks, and variances added up: a loop over half of the names."""
    mean_of(model.parameters(), step)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            dist.all_reduce(buffer)
        if name.endswith("running_mean"):
            dist.all_reduce(buffer)
            buffer.div_(step.world_size)
