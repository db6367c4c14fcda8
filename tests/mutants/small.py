"""Small workloads for mutants: a few parameters, samples of twelve numbers, no images.

Each has what makes one mechanism visible: tied weights, an embedding, a layer that some ranks never
use. The shared base is quick, so that a mutant costs about a second.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch, Step, Training
from distcheck.workloads.datasets.synthetic import hash24

_FEATURES, _CLASSES = 12, 4


def average(model: nn.Module, step: Step) -> None:
    """What is right: the mean over all samples, for unequal shards too."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= step.weight
            dist.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


class Points:
    """4,096 samples of twelve numbers in [-1, 1) and one of four labels, from a hash of their
    index.
    """

    shape = (_FEATURES,)
    classes = _CLASSES

    def size(self, *, train: bool) -> int:
        return 4096

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = ids.unsqueeze(1) * 64 + torch.arange(_FEATURES + 1)
        drawn = hash24(keys)
        inputs = drawn[:, 1:].to(torch.float32).div_(2**23).sub_(1.0)
        return inputs.to(dtype), drawn[:, 0] % _CLASSES


class Small:
    """Two layers; SGD with momentum. The base of the others."""

    def samples(self) -> Points:
        return Points()

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs), batch.labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Three(Small):
    """A layer more, which a pair of divided layers leaves over."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, classes)
        )


class ClippedByTheLoop(Three):
    """The loop clips, and every step is above the limit."""

    training = Training(clip_norm=0.05)


POSITIONS = 6  # tokens of a sample, of two numbers each


def token_rows(batch: Batch) -> torch.Tensor:
    """[n, positions, 2]."""
    return batch.inputs.unflatten(1, (POSITIONS, 2))


def targets(batch: Batch) -> torch.Tensor:
    """A class for each token: [n, positions]."""
    return (batch.labels.unsqueeze(1) + torch.arange(POSITIONS)) % _CLASSES


def counted(batch: Batch) -> torch.Tensor:
    """Which tokens are not padding; a sample has two to five: [n, positions]."""
    return torch.arange(POSITIONS) < 2 + batch.labels.unsqueeze(1)


class ManyLengths(Small):
    """Samples of several tokens; the loss is the mean over those that are not padding."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        counts = counted(batch)
        return F.cross_entropy(model(token_rows(batch))[counts], targets(batch)[counts])


class Drop(nn.Module):
    """Drops half of [n, units], by a hash of row and unit in place of random numbers.

    A rank that has the units from `first_unit` on drops what one process drops of them. Libraries
    that draw by a counter for each element do the same.
    """

    first_unit = 0

    def forward(self, units: torch.Tensor) -> torch.Tensor:
        rows, columns = (torch.arange(size) for size in units.shape)
        kept = hash24(1024 * rows.unsqueeze(1) + self.first_unit + columns) >= 2**23
        return units * kept * 2


class Dropping(Small):
    """Two masks, each after a layer that a pair of divided layers may have it after."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_FEATURES, 16), nn.GELU(), Drop(),
            nn.Linear(16, 8), nn.GELU(), Drop(), nn.Linear(8, classes),
        )  # fmt: skip


class TiedChain(Small):
    """One weight in the first and the last but one layer of a chain."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        chain = nn.Sequential(
            nn.Linear(_FEATURES, _FEATURES, bias=False), nn.ReLU(),
            nn.Linear(_FEATURES, _FEATURES, bias=False), nn.Linear(_FEATURES, classes),
        )  # fmt: skip
        chain[2].weight = chain[0].weight
        return chain


class WithAdam(Small):
    """Adam hardly notices the scale of a gradient."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)


class InGroups(Small):
    """Weights decay, biases do not; the rate grows with every step."""

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        listed = list(parameters)
        return [
            {"params": [p for p in listed if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in listed if p.dim() == 1], "lr": 0.01},
        ]

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["initial_lr"] = group.get("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * (1 + step)


class Clipping(Small):
    """Clips by the norm of all gradients, as a part of the optimizer's step."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return clipping(list(parameters), ranks=1, epsilons=1)


def clipping(parameters: list[nn.Parameter], *, ranks: int, epsilons: int) -> torch.optim.Optimizer:
    """SGD that clips to a norm of 0.05. Right is a norm over one replica and one epsilon."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def clip(*_: object) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        square = torch.stack([g.square().sum() for g in gradients]).sum() * ranks
        most = 0.05 / (square.sqrt() + 1e-4 * epsilons)
        for gradient in gradients:
            gradient *= most.clamp(max=1.0)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class Normalized(Small):
    """BatchNorm between the layers."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
        )


class _Tied(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(_FEATURES, _FEATURES, bias=False)
        self.middle = nn.Linear(_FEATURES, _FEATURES)
        self.outputs = nn.Linear(_FEATURES, _FEATURES, bias=False)
        self.outputs.weight = self.inputs.weight
        self.head = nn.Linear(_FEATURES, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.inputs(inputs)).relu()
        return self.head(self.outputs(hidden))


class Tied(Small):
    """One weight in two layers."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Tied(classes)


class _Twice(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.shared = nn.Linear(_FEATURES, _FEATURES)
        self.head = nn.Linear(_FEATURES, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.shared(self.shared(inputs).relu()).relu())


class ModelCalledTwice(Small):
    """A layer that is called twice in one forward pass."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Twice(classes)


class _Embedded(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = ((inputs.float() + 1) * 24).long()
        return self.head(self.embedding(words).mean(1))


class Embedded(Small):
    """An embedding of which the last rows are never used."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Embedded(classes)


class _Branching(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 16)
        self.branch = nn.Linear(16, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, inputs: torch.Tensor, takes: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).relu()
        if bool(takes.any()):
            extra = self.branch(hidden[takes]).relu()
            hidden = hidden.index_add(0, takes.nonzero().reshape(-1), extra)
        return self.head(hidden)


class _InOrder(Small):
    """Samples in the order of their index, so that what a step reads is known."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Branching(classes)

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        return range(rank, size, world)

    def takes(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch.inputs, self.takes(batch.ids)), batch.labels)


class SometimesUnused(_InOrder):
    """A layer that every rank uses at step 0, and rank 0 alone at step 1."""

    def takes(self, ids: torch.Tensor) -> torch.Tensor:
        return ids <= 256


class UsedFromStepOne(_InOrder):
    """A layer that nobody uses at step 0: unfrozen later."""

    def takes(self, ids: torch.Tensor) -> torch.Tensor:
        return ids >= 256


class Frozen(Small):
    """The first layer is frozen."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        model = super().model(sample_shape=sample_shape, classes=classes)
        next(model.children()).requires_grad_(False)
        return model


class _TwoPrecisions(nn.Sequential):
    def to(self, *args: Any, **kwargs: Any) -> "_TwoPrecisions":
        super().to(*args, **kwargs)
        self[0].float()
        return self

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self[0](inputs.float()).relu()
        return self[2](hidden.to(self[2].weight.dtype))


class TwoPrecisions(Small):
    """A first layer in float32, the rest in the dtype that was asked for."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _TwoPrecisions(nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, classes))


class _Images(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = inputs.view(-1, 3, 2, 2)
        return self.head(self.convolution(images).relu().flatten(1))


class Images(Small):
    """A convolution, whose weight can lie in memory in two ways."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Images(classes)


class _Complex(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(16, _FEATURES, 2) / 4)  # real and imaginary parts
        self.head = nn.Linear(16, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(self.pairs) * (0.6 + 0.8j)
        return self.head((torch.view_as_real(turned).sum(-1) @ inputs.T).T.relu())


class Complex(Small):
    """A complex weight, held as pairs of real numbers."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Complex(classes)


class LargeGradients(Small):
    """Gradients of 30,000; float16 ends at 65,504."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch.inputs)[:, 0].mean() * 3e4

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-7)


class OneElement(Small):
    """A last layer with a bias of one element."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch.inputs).reshape(-1) - batch.labels).square().mean()


class _WithEmpty(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_parameter("empty", nn.Parameter(torch.empty(0, 16)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) + self.empty.sum()


class WithEmpty(Small):
    """A parameter without elements."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _WithEmpty(nn.Linear(_FEATURES, 16), nn.ReLU(), nn.Linear(16, classes))


class _Twins(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(_FEATURES, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.outputs = nn.Linear(16, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(inputs).relu()
        return self.outputs(self.second(self.first(hidden).relu()).relu())


class Twins(Small):
    """Two layers of the same shape."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Twins(classes)


class _Reassigning(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 16)
        self.head = nn.Linear(16, classes)
        self.register_buffer("mean", torch.zeros(_FEATURES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + 0.1 * inputs.detach().mean(0)
        return self.head(self.first(inputs).relu())


class Reassigning(Small):
    """A running mean that is not written in place: every forward pass makes a new tensor."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Reassigning(classes)
