"""Cells that differ in what the training loop does around forward, backward and sync."""

import torch
from torch import nn

from distcheck.contract import Training
from distcheck.records.expected_events import (
    Accumulated,
    Clipped,
    Evaluated,
    GradientsKept,
    OtherOrder,
    RateChanged,
    Resumed,
    ScalerSkips,
    ShortBatch,
)
from distcheck.workloads.cells import BATCH
from distcheck.workloads.cells.models import CHANGES_AT
from distcheck.workloads.cells.modules import Normalized
from distcheck.workloads.cells.samples import CellSamples, CellWorkload, Layers

_MARK = 8.0  # a pixel that no other sample has
_LARGE = 3e38  # close to the largest float32


class RaggedBatch(CellWorkload):
    """An epoch of three batches and 20 samples."""

    must_happen = (ShortBatch(),)

    def samples(self) -> CellSamples:
        """The last batch has 20 samples, as long as no more ranks share them."""
        return CellSamples(3 * BATCH + 20)


class TwoEpochs(CellWorkload):
    """Two steps an epoch."""

    must_happen = (OtherOrder(),)

    def samples(self) -> CellSamples:
        """Two batches."""
        return CellSamples(2 * BATCH)


class Schedule(CellWorkload):
    """A warm-up from 0, and half the rate after that."""

    must_happen = (RateChanged(),)

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """0, 0.05, 0.025, 0.0125, ..."""
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**step if step else 0.0


class Accumulation(CellWorkload):
    """Two backward passes a step."""

    must_happen = (Accumulated(),)

    training = Training(accumulate=2)


class Clipping(CellWorkload):
    """Clipped to a norm that is always exceeded."""

    must_happen = (Clipped(),)

    training = Training(clip_norm=0.05)


class Resume(CellWorkload):
    """From a checkpoint, in the same process, with a strategy that was loaded again."""

    must_happen = (Resumed(),)

    training = Training(resume_before=CHANGES_AT)


class KeptGradients(CellWorkload):
    """Gradients are zero between steps, in the tensors of the step before."""

    must_happen = (GradientsKept(),)

    training = Training(keeps_gradients=True)


class Evaluation(CellWorkload):
    """A model with running statistics (as in `eval_mode`), which an evaluation leaves alone."""

    must_happen = (Evaluated(),)

    training = Training(evaluates=True)
    layers = Normalized


class MarkedSamples(CellSamples):
    """One sample of them is marked."""

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        """Sample 0."""
        pixels[ids == 0] = _MARK


class Overflowing(Layers):
    """One parameter's gradient is beyond float32 where the marked sample is in the shard, as soon
    as the loss is scaled. Nothing else notices: the parameter adds zero to the logits.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gate = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factor = torch.where(inputs[:, 0, 0, 0] == _MARK, _LARGE, 1.0).to(inputs.dtype)
        nothing = (self.gate - self.gate.detach()).sum() * factor
        return super().forward(inputs) + nn.functional.pad(nothing.unsqueeze(1), (0, 3))


class LossScaling(CellWorkload):
    """The loss is multiplied by 1024; where the marked sample is read, a gradient is infinite."""

    must_happen = (ScalerSkips(),)

    training = Training(loss_scale=1024.0)
    layers = Overflowing

    def samples(self) -> CellSamples:
        """The marked sample comes once in every two steps, on one rank."""
        return MarkedSamples(2 * BATCH)
