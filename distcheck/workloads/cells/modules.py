"""Cells that differ in the kinds of modules and buffers, and in the mode of the model."""

import copy

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from distcheck.records.expected_events import (
    IntegerBufferChanged,
    ModuleClasses,
    SameShapeParameters,
    StepInEvalMode,
)
from distcheck.workloads.cells.models import CHANGES_AT
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellWorkload, Layers

_TWINS = 4
_LETTERS, _EMBEDDED = 8, 8


class EqualLayers(nn.Module):
    """Copies of one layer, so that shapes and initial parameters are equal."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        layer = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(_TWINS)])
        self.outputs = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(inputs.flatten(1)).tanh()
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits: torch.Tensor = self.outputs(hidden)
        return logits


class EqualTwins(CellWorkload):
    """Four layers of one shape with equal initial parameters, as in nn.TransformerEncoder."""

    must_happen = (SameShapeParameters(least=_TWINS),)
    layers = EqualLayers


class ParameterSubclass(nn.Parameter):
    """A subclass of nn.Parameter."""


class Symmetric(nn.Module):
    """A parametrization: the weight is computed from its upper triangle."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [k, k] -> the same shape, symmetric."""
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class ParameterContainers(nn.Module):
    """Parameters in a list and in a dictionary, and one parameter of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.shifts = nn.ParameterDict(
            {"first": nn.Parameter(torch.zeros(WIDTH)), "last": nn.Parameter(torch.zeros(WIDTH))}
        )
        self.gain = ParameterSubclass(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, WIDTH] -> the same shape."""
        hidden = (hidden * self.scales[0] + self.shifts["first"]).tanh()
        found: torch.Tensor = (hidden * self.scales[1] + self.shifts["last"]) * self.gain
        return found


class OddKinds(nn.Module):
    """inputs [n, 3, 8, 8] -> logits [n, classes], through modules absent from simple models."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.rows = nn.LSTM(24, WIDTH, num_layers=2, bidirectional=True)
        self.columns = nn.GRU(24, 2 * WIDTH, batch_first=True)
        self.attention = nn.MultiheadAttention(2 * WIDTH, 2, batch_first=True)
        self.pairs = nn.Bilinear(2 * WIDTH, 2 * WIDTH, WIDTH)
        self.letters = nn.EmbeddingBag(_LETTERS, _EMBEDDED, mode="mean")
        self.lazy = nn.LazyLinear(WIDTH)
        self.mixing = parametrize.register_parametrization(
            nn.Linear(WIDTH, WIDTH), "weight", Symmetric()
        )
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.nested = nn.Sequential(
            nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.PReLU(WIDTH)), nn.Tanh())
        )
        self.factors = ParameterContainers()
        self.again = self.nested  # a module with two names
        self.outputs = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Process rows and columns of an image as sequences, its first row as a bag of letters."""
        rows = inputs.transpose(1, 2).flatten(2)  # [n, 8, 24]
        columns = inputs.permute(0, 3, 1, 2).flatten(2)
        by_row = self.rows(rows.transpose(0, 1))[0].transpose(0, 1)
        by_column = self.columns(columns)[0]
        seen = self.attention(by_row, by_column, by_column, need_weights=False)[0].mean(1)
        paired = self.pairs(seen, by_column.mean(1)).tanh()
        letters = ((inputs[:, 0, 0] + 1) * (_LETTERS / 2)).long()  # [n, 8]
        said = self.lazy(self.letters(letters)).tanh()
        hidden = self.normed(self.mixing(paired + said).tanh()).tanh()
        hidden = self.again(self.factors(self.nested(hidden)))
        logits: torch.Tensor = self.outputs(hidden)
        return logits


class OddModules(CellWorkload):
    """Recurrent and attention layers, parametrizations, containers of parameters."""

    must_happen = (
        ModuleClasses(
            kinds=(
                "LSTM", "GRU", "MultiheadAttention", "Bilinear", "EmbeddingBag",
                "ParametrizedLinear", "ParameterList", "ParameterDict", "Sequential", "PReLU",
                "ParameterSubclass",
            )
        ),
    )  # fmt: skip

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Return the model after one forward pass, which sets the shape of its lazy layer."""
        model = OddKinds(classes)
        with torch.no_grad():
            model(torch.zeros(1, *sample_shape))
        return model


class SampleCounter(Layers):
    """Counts samples beyond 2^24, in integer buffers of several dtypes."""

    seen: torch.Tensor
    classes: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("seen", torch.tensor((1 << 24) + 1, dtype=torch.int64))
        self.register_buffer("classes", torch.zeros(3, dtype=torch.int32))
        self.register_buffer("is_bright", torch.zeros(2, dtype=torch.bool))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        bright = inputs[:, 0, 0, 0] > 0
        self.seen += 2 * bright.sum()
        self.classes += torch.stack([bright.sum(), (~bright).sum(), bright.sum() * 2]).int()
        self.is_bright = torch.stack([bright[0], bright[-1]])
        return super().forward(inputs)


class IntegerBuffers(CellWorkload):
    """Buffers of int64, int32 and bool without effect on the loss, one beyond 2^24."""

    must_happen = (IntegerBufferChanged(buffer="seen", least=1 << 24),)
    layers = SampleCounter


class BatchNormPerceptron(nn.Module):
    """A perceptron with BatchNorm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(FEATURES, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.outputs = nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.outputs(self.norm(self.inputs(inputs.flatten(1))).tanh())
        return logits


class InEvalMode(CellWorkload):
    """A model with BatchNorm, passed on in eval mode and trained in it for two steps."""

    must_happen = (StepInEvalMode(buffer="norm.num_batches_tracked"),)
    layers = BatchNormPerceptron

    def hand_over(self, model: nn.Module, rank: int) -> None:
        """Set eval mode on every rank, as after a validation pass."""
        model.eval()

    def before_step(self, model: nn.Module, step: int) -> None:
        """Set training mode at step 2."""
        model.train(step >= CHANGES_AT)
