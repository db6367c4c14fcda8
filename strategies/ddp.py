"""torch's DistributedDataParallel with its default settings.

DDP averages gradients in buckets while backward is still running, and every rank counts the
same: with unequal shards the loss has to carry the weight, before backward.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distcheck.contract import CellName, DDPBuckets, Step, strategy

# What has a gradient in one step must have one in all, on every rank: DDP raises, a step too late.
# What was frozen when DDP was made is never exchanged, and nothing is raised.
CHANGING: tuple[CellName, ...] = (
    "unused_parameters",
    "unused_later",
    "frozen_later",
    "unfrozen_later",
    "absent_on_some",
)


@strategy(
    order=DDPBuckets(),
    scale="multiply-before",
    weighting="loss",
    sync="during-backward",
    buffers="rank 0",
    initial_state="rank 0",
    declines=CHANGING,
)
class DDP:
    """Wraps the model; backward on the wrapper does the rest."""

    def wrap(self, model: nn.Module) -> nn.Module:
        """Broadcasts rank 0's parameters and buffers, and installs DDP's hooks."""
        return DistributedDataParallel(model)

    def scale_loss(self, loss: torch.Tensor, step: Step) -> torch.Tensor:
        """Weights a shard by its number of samples; equal shards need no weight."""
        return loss if step.weight == 1.0 else loss * step.weight
