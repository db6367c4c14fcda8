"""Cells with unusual dtypes or layouts of gradients."""

from collections.abc import Iterable

import torch
from torch import nn

from distcheck.records.expected_events import GradientDtypes, NonzeroRowsDiffer
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellSamples, CellWorkload

_SAMPLES, _COLUMNS = 512, 8


class MixedLayers(nn.Module):
    """Layers with different dtypes; each computes in its dtype."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.in_single = nn.Linear(FEATURES, WIDTH)
        self.in_double = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.in_short = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.outputs = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.in_single(inputs.flatten(1)).tanh()
        hidden = self.in_double(hidden.double()).tanh()
        hidden = self.in_short(hidden.to(torch.bfloat16)).tanh()
        logits: torch.Tensor = self.outputs(hidden.to(self.outputs.weight.dtype))
        return logits


class MixedDtypes(CellWorkload):
    """Gradients in three dtypes."""

    must_happen = (GradientDtypes(dtypes=("float32", "float64", "bfloat16")),)

    own_dtypes = True
    layers = MixedLayers


class ComplexLayers(nn.Module):
    """A complex layer, and a real layer of its two parts."""

    dtype = torch.complex64

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, FEATURES, dtype=self.dtype) / 16)
        self.outputs = nn.Linear(2 * WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.flatten(1).to(self.weight.dtype) @ self.weight.t()
        parts = torch.view_as_real(hidden).flatten(1).to(self.outputs.weight.dtype)
        logits: torch.Tensor = self.outputs(parts.tanh())
        return logits


class ComplexParameters(CellWorkload):
    """Gradients with an imaginary part."""

    must_happen = (GradientDtypes(dtypes=("complex64",)),)

    own_dtypes = True
    layers = ComplexLayers


class LongComplexLayers(ComplexLayers):
    """`ComplexLayers` with complex128; the real layer stays in float32."""

    dtype = torch.complex128


class Complex128Parameters(CellWorkload):
    """Gradients with two parts in float64."""

    own_dtypes = True
    must_happen = (GradientDtypes(dtypes=("complex128",)),)
    layers = LongComplexLayers


class NumberedSamples(CellSamples):
    """Samples whose first pixel is the sample's index."""

    def mark(self, pixels: torch.Tensor, ids: torch.Tensor) -> None:
        pixels.copy_(ids)


class WordEmbedding(nn.Module):
    """An embedding with one row for every two samples, which are often on different ranks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_SAMPLES // 2, _COLUMNS, sparse=True)
        self.outputs = nn.Linear(_COLUMNS, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs[:, 0, 0, 0].long() // 2
        logits: torch.Tensor = self.outputs(self.words(rows).tanh())
        return logits


def _coalesce(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()


class SparseGradients(CellWorkload):
    """Sparse gradients with few rows."""

    must_happen = (NonzeroRowsDiffer(parameter="words.weight"),)

    layers = WordEmbedding

    def samples(self) -> CellSamples:
        """Return twice as many samples as a step uses."""
        return NumberedSamples(_SAMPLES)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD without momentum, which accepts sparse gradients. Duplicate rows are coalesced
        first; otherwise the update's bits would depend on whether the synchronization does so.
        """
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        optimizer.register_step_pre_hook(_coalesce)
        return optimizer
