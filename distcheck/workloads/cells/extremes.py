"""Cells with gradients of unusual magnitude: infinities and NaN, close to the largest float32, and
subnormal.

One small parameter without any effect on the loss has these gradients. The rest of the model trains
as usual, whatever happens to this parameter.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.records.expected_events import GradientMagnitude, NonfiniteGradient
from distcheck.workloads.cells.samples import CellWorkload, Layers


class _Silent(torch.autograd.Function):
    """Forward, zeros; backward, `sizes` times each sample's gradient, summed."""

    @staticmethod
    def forward(context: Any, parameter: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(sizes)
        return sizes.new_zeros(len(sizes))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (sizes,) = context.saved_tensors
        return (gradients[0].unsqueeze(1) * sizes).sum(0), None


class GatedParameter(nn.Module):
    """A parameter whose gradient is the mean of `factors` times a pixel's magnitude."""

    def __init__(self, factors: Sequence[float]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(len(factors)))
        self._factors = tuple(factors)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, 3, 8, 8] -> zeros [n]; only a few samples have an infinity or NaN."""
        factors = torch.tensor(self._factors, dtype=inputs.dtype, device=inputs.device)
        sizes = 1.0 + inputs[:, 0, 0, : len(factors)].abs() / 4
        is_rare = (inputs[:, 1, 0, 0] > 1.0 - 2.0**-5).unsqueeze(1)  # one in 64
        unusual = torch.where(is_rare, factors, sizes)
        sizes = torch.where(factors.isfinite(), factors * sizes, unusual)
        zeros: torch.Tensor = _Silent.apply(self.gate, sizes)  # type: ignore[no-untyped-call]
        return zeros


class WithGate(Layers):
    """A perceptron whose logits [n, classes] are extended by a column of zeros."""

    def __init__(self, classes: int, factors: Sequence[float]) -> None:
        super().__init__(classes)
        self.beside = GatedParameter(factors)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, 3, 8, 8] -> [n, classes + 1]."""
        found: torch.Tensor = self.beside(inputs)
        return torch.cat([super().forward(inputs), found.unsqueeze(1)], dim=1)


class _Extreme(CellWorkload):
    factors: tuple[float, ...]

    def layers(self, classes: int) -> nn.Module:
        return WithGate(classes, self.factors)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy plus the mean of the zeros."""
        outputs: torch.Tensor = model(batch.inputs)
        logits, zeros = outputs.tensor_split([outputs.shape[1] - 1], dim=1)
        return F.cross_entropy(logits, batch.labels) + zeros.mean()


class NonFiniteGradients(_Extreme):
    """An infinity of either sign, a NaN, and a finite number, in one parameter."""

    factors = (float("inf"), -float("inf"), float("nan"), 1.0)
    must_happen = (NonfiniteGradient(parameter="beside.gate"),)


class HugeGradients(_Extreme):
    """Elements whose squares overflow, and whose sum over ranks does not."""

    factors = (1e30, -1e30, 3e30, -2e30)
    must_happen = (GradientMagnitude(parameter="beside.gate", least=1e30, most=1e31),)


class DenormalGradients(_Extreme):
    """Elements below the smallest normal number of float32, 1.2e-38."""

    factors = (1e-39, -2e-40, 3e-41, 0.0)
    must_happen = (GradientMagnitude(parameter="beside.gate", least=1e-45, most=1.17e-38),)
