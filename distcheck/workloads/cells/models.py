"""Cells that differ in which parameters are used, and how often."""

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.records import expected_events as happenings
from distcheck.records.expected_events import (
    BufferChanged,
    NoGradient,
    ParameterFrozen,
    RankRandomNumbersDiffer,
    TiedParameter,
)
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellWorkload, Layers

CHANGES_AT = 2  # step at which a layer is frozen, unfrozen or left out


class TiedLayers(Layers):
    """A second hidden layer that shares the weight of the first, and has a separate bias."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.middle.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.inputs(inputs.flatten(1)).tanh()).tanh()
        logits: torch.Tensor = self.outputs(self.again(hidden).tanh())
        return logits


class TiedWeights(CellWorkload):
    """Two layers share one weight; its name is that of the first layer."""

    must_happen = (TiedParameter(),)
    layers = TiedLayers


class UnusedParameters(CellWorkload):
    """A middle layer that the forward pass never calls."""

    must_happen = (NoGradient(parameter="middle.weight"),)

    def layers(self, classes: int) -> nn.Module:
        """Return layers whose middle parameters never have a gradient."""
        model = Layers(classes)
        model.skips_middle = True
        return model


class UnusedLater(CellWorkload):
    """A layer that is called in the first two steps only."""

    must_happen = (NoGradient(parameter="middle.weight", after_one=True),)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Stop calling the layer; its momentum stays unchanged and unused."""
        assert isinstance(model, Layers)
        model.skips_middle = step >= CHANGES_AT


class FrozenParameters(CellWorkload):
    """A layer that is frozen before the strategy receives the model."""

    must_happen = (ParameterFrozen(parameter="middle.weight"),)

    def layers(self, classes: int) -> nn.Module:
        """Return a model with a frozen middle layer, through which gradients pass."""
        model = Layers(classes)
        model.middle.requires_grad_(False)
        return model


class FrozenLater(CellWorkload):
    """A layer that is frozen during training."""

    must_happen = (ParameterFrozen(parameter="middle.weight", after_training=True),)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Freeze the layer; its momentum stays unchanged and unused."""
        assert isinstance(model, Layers)
        model.middle.requires_grad_(step < CHANGES_AT)


class UnfrozenLater(CellWorkload):
    """A layer that is unfrozen during training."""

    must_happen = (happenings.ParameterUnfrozen(parameter="middle.weight"),)

    def hand_over(self, model: nn.Module, rank: int) -> None:
        """Freeze the layer before the strategy receives the model."""
        self.before_step(model, 0)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Unfreeze the layer; the optimizer has had it from the beginning."""
        assert isinstance(model, Layers)
        model.middle.requires_grad_(step >= CHANGES_AT)


class ModelCalledTwice(CellWorkload):
    """One forward pass over each half of the shard, one backward: parameters are used twice."""

    must_happen = (happenings.ModelCalledTwice(),)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = torch.cat([model(half) for half in batch.inputs.tensor_split(2)])
        return F.cross_entropy(logits, batch.labels)


class WithDropout(CellWorkload):
    """Dropout over the hidden layer."""

    must_happen = (RankRandomNumbersDiffer(),)

    def layers(self, classes: int) -> nn.Module:
        """Return a perceptron that drops half of the hidden units, at random for every sample."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(FEATURES, WIDTH),
            nn.Tanh(),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, classes),
        )


class RunningMeanModel(Layers):
    """Keeps a running mean of its inputs, assigned to a new tensor in every step."""

    mean: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layers. Reassigns the mean, which does not affect the loss, in every call."""
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().flatten(1).mean(0)
        return super().forward(inputs)


class ReassignedBuffers(CellWorkload):
    """A reassigned buffer: code that holds on to its first tensor uses a stale buffer."""

    must_happen = (BufferChanged(buffer="mean"),)
    layers = RunningMeanModel
