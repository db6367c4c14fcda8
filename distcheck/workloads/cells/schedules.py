"""Cells that differ in the training loop around forward, backward and synchronization."""

import torch
from torch import nn

from distcheck.contract import Training
from distcheck.records.expected_events import (
    AccumulatedPasses,
    EvaluatedBeforeStep,
    GradientsClipped,
    GradientsZeroedInPlace,
    LearningRateChanged,
    Resumed,
    SampleOrderChanged,
    ScalerSkippedStep,
    ShortBatch,
)
from distcheck.workloads.cells import BATCH
from distcheck.workloads.cells.models import CHANGES_AT
from distcheck.workloads.cells.modules import BatchNormPerceptron
from distcheck.workloads.cells.samples import CellSamples, CellWorkload, Layers

_MARK = 8.0  # a pixel value of no other sample
_LARGE = 3e38  # close to the largest float32


class RaggedBatch(CellWorkload):
    """An epoch of three batches and 20 samples."""

    must_happen = (ShortBatch(),)

    def samples(self) -> CellSamples:
        """Return samples for three batches; the third has 20 samples, enough for up to 20 ranks."""
        return CellSamples(3 * BATCH + 20)


class TwoEpochs(CellWorkload):
    """Two steps per epoch."""

    must_happen = (SampleOrderChanged(),)

    def samples(self) -> CellSamples:
        return CellSamples(2 * BATCH)


class Schedule(CellWorkload):
    """A warm-up from 0, then half the rate after every step."""

    must_happen = (LearningRateChanged(),)

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rates 0, 0.05, 0.025, 0.0125, ..."""
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.5**step if step else 0.0


class Accumulation(CellWorkload):
    """Two backward passes per step."""

    must_happen = (AccumulatedPasses(),)

    training = Training(accumulate=2)


class Clipping(CellWorkload):
    """Gradient clipping to a norm that is always exceeded."""

    must_happen = (GradientsClipped(),)

    training = Training(clip_norm=0.05)


class Resume(CellWorkload):
    """Resume from a checkpoint in the same process, with a newly loaded strategy."""

    must_happen = (Resumed(),)

    training = Training(resume_before=CHANGES_AT)


class KeptGradients(CellWorkload):
    """Between steps, gradients are set to zero in place, not to None."""

    must_happen = (GradientsZeroedInPlace(),)

    training = Training(keeps_gradients=True)


class Evaluation(CellWorkload):
    """A model with running statistics (as in `eval_mode`), which an evaluation must not change."""

    must_happen = (EvaluatedBeforeStep(),)

    training = Training(evaluates=True)
    layers = BatchNormPerceptron


class MarkedSamples(CellSamples):
    """Samples with a mark on one of them."""

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        pixels[ids == 0] = _MARK


class OverflowingParameter(Layers):
    """If the marked sample is in the shard and the loss is scaled, the gradient of one parameter
    overflows float32. The parameter adds zero to the logits, so nothing else changes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.gate = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        factor = torch.where(inputs[:, 0, 0, 0] == _MARK, _LARGE, 1.0).to(inputs.dtype)
        nothing = (self.gate - self.gate.detach()).sum() * factor
        return super().forward(inputs) + nn.functional.pad(nothing.unsqueeze(1), (0, 3))


class LossScaling(CellWorkload):
    """The loss is multiplied by 1024; ranks that read the marked sample have infinite gradients."""

    must_happen = (ScalerSkippedStep(),)

    training = Training(loss_scale=1024.0)
    layers = OverflowingParameter

    def samples(self) -> CellSamples:
        """Return samples so that one rank reads the marked sample once in two steps."""
        return MarkedSamples(2 * BATCH)
