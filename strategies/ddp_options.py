"""torch's DistributedDataParallel with one of its options changed, one class each.

An option changes how gradients are grouped and when they are exchanged, so each has an order of
its own; what the mean is does not change.
"""

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import Batch, DDPBuckets, LossOf, Step, strategy

from .ddp import CHANGING, DDP

_ddp = partial(
    strategy,
    scale="multiply-before",
    weighting="loss",
    sync="during-backward",
    buffers="rank 0",
    initial_state="rank 0",
    declines=CHANGING,
)


@_ddp(order=DDPBuckets(first_mib=0.125, cap_mib=0.125))
class SmallBuckets(DDP):
    """DDP with buckets of 128 KiB: many collectives, in flight while backward still runs."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The cap also replaces the smaller limit that the first bucket has by default."""
        return DistributedDataParallel(model, bucket_cap_mb=0.125)


# Gradients that are in a bucket already are divided there; others are multiplied on their way in.
@_ddp(order=DDPBuckets(), declines=(*CHANGING, "kept_gradients"))
class BucketView(DDP):
    """DDP whose gradients are views of its buckets, so that nothing is copied back."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Saves memory of the size of the gradients; the numbers are the same."""
        return DistributedDataParallel(model, gradient_as_bucket_view=True)


# What it learns in the first step must hold in all, and an exchange be in it: with no_sync() there,
# torch stops with an internal error.
@_ddp(
    order=DDPBuckets(rebuilt_at=2),
    declines=("unused_later", "frozen_later", "unfrozen_later", "accumulation", "absent_on_some"),
)
class StaticGraph(DDP):
    """DDP that relies on every step using the same parameters: it learns which, in the first."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """The first step exchanges everything at its end; buckets are rebuilt after the second."""
        return DistributedDataParallel(model, static_graph=True)


@_ddp(order=DDPBuckets(rebuilt_at=None), declines=("unfrozen_later",))
class FindUnused(DDP):
    """DDP that looks for unused parameters at every step, and never rebuilds its buckets."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Walks the graph after every forward; parameters outside it count as finished."""
        return DistributedDataParallel(model, find_unused_parameters=True)


@_ddp(order=DDPBuckets(), micro_batches=2)
class NoSync(DDP):
    """DDP with gradient accumulation: two micro-batches per step, synchronized after the second."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keeps the wrapper, whose no_sync() is needed at every step."""
        self._wrapped = DistributedDataParallel(model)
        return self._wrapped

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        """Every micro-batch counts by its share of the shard; all but the last stay local."""
        *earlier, last = batch.split(2)
        with self._wrapped.no_sync():
            losses = [self._backward_one(loss_of, part, step) for part in earlier]
        losses.append(self._backward_one(loss_of, last, step))
        return torch.stack(losses).sum()

    def _backward_one(self, loss_of: LossOf, part: Batch, step: Step) -> torch.Tensor:
        loss = loss_of(part) * (len(part.ids) / step.samples)
        self.scale_loss(loss, step).backward()
        return loss.detach()
