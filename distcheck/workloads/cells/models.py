"""Cells that differ in which parameters take part, and how often."""

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.records import expected_events as happenings
from distcheck.records.expected_events import (
    BufferReplaced,
    Frozen,
    NoGradient,
    OwnRandomNumbers,
    Tied,
)
from distcheck.workloads.cells.samples import FEATURES, WIDTH, CellWorkload, Layers

CHANGES_AT = 2  # the step from which a layer is frozen, or left out


class TiedLayers(Layers):
    """A second hidden layer with the first one's weight, and a bias of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.middle.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The tied weight is used twice."""
        hidden = self.middle(self.inputs(inputs.flatten(1)).tanh()).tanh()
        logits: torch.Tensor = self.outputs(self.again(hidden).tanh())
        return logits


class TiedWeights(CellWorkload):
    """Two layers share one weight, whose one name is that of its first layer."""

    must_happen = (Tied(),)
    layers = TiedLayers


class UnusedParameters(CellWorkload):
    """A layer between two others that the forward pass never calls."""

    must_happen = (NoGradient(parameter="middle.weight"),)

    def layers(self, classes: int) -> nn.Module:
        """Its parameters never have a gradient."""
        model = Layers(classes)
        model.skips_middle = True
        return model


class UnusedLater(CellWorkload):
    """A layer that is called in the first two steps only."""

    must_happen = (NoGradient(parameter="middle.weight", after_one=True),)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Leaves the layer out; its momentum stays as it is, and does nothing."""
        assert isinstance(model, Layers)
        model.skips_middle = step >= CHANGES_AT


class FrozenParameters(CellWorkload):
    """A layer that was frozen before the strategy saw the model."""

    must_happen = (Frozen(parameter="middle.weight"),)

    def layers(self, classes: int) -> nn.Module:
        """Gradients pass through the frozen layer to the first one."""
        model = Layers(classes)
        model.middle.requires_grad_(False)
        return model


class FrozenLater(CellWorkload):
    """A layer that is frozen while training is under way."""

    must_happen = (Frozen(parameter="middle.weight", after_training=True),)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Freezes the layer; its momentum stays as it is, and does nothing."""
        assert isinstance(model, Layers)
        model.middle.requires_grad_(step < CHANGES_AT)


class UnfrozenLater(CellWorkload):
    """A layer that begins to train while training is under way."""

    must_happen = (happenings.Unfrozen(parameter="middle.weight"),)

    def hand_over(self, model: nn.Module, rank: int) -> None:
        """A strategy sees it frozen."""
        self.before_step(model, 0)

    def before_step(self, model: nn.Module, step: int) -> None:
        """Unfreezes the layer, whose optimizer has known it from the beginning."""
        assert isinstance(model, Layers)
        model.middle.requires_grad_(step >= CHANGES_AT)


class CalledTwice(CellWorkload):
    """One forward pass over each half of the shard, one backward: parameters are used twice."""

    must_happen = (happenings.CalledTwice(),)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean over both halves."""
        logits = torch.cat([model(half) for half in batch.inputs.tensor_split(2)])
        return F.cross_entropy(logits, batch.labels)


class WithDropout(CellWorkload):
    """A mask over the hidden layer."""

    must_happen = (OwnRandomNumbers(),)

    def layers(self, classes: int) -> nn.Module:
        """Half of the hidden units are left out, others for every sample."""
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(FEATURES, WIDTH),
            nn.Tanh(),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, classes),
        )


class Averages(Layers):
    """Keeps a running mean of its inputs, in a new tensor every time."""

    mean: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The mean is assigned, not updated in place, and takes no part in the loss."""
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().flatten(1).mean(0)
        return super().forward(inputs)


class ReassignedBuffers(CellWorkload):
    """Code that holds on to a buffer's first tensor works on a dead one."""

    must_happen = (BufferReplaced(buffer="mean"),)
    layers = Averages
