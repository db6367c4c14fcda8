"""Small models, each with one thing that real models have; a mutant's witness is one of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch

from ..small import Small

_FEATURES = 12


class Plain(Small):
    """Two linear layers."""


class _KindsModel(nn.Module):
    """Kinds of parameters: on the model itself, of one to five dimensions, of one element."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 8)
        self.positions = nn.Parameter(torch.randn(1, _FEATURES, 8) / 4)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gain = nn.Parameter(torch.ones(1))
        self.temperature = nn.Parameter(torch.ones(()))
        self.along = nn.Conv1d(8, 8, 3, padding=1)
        self.groups = nn.GroupNorm(2, 8)
        self.pointwise = nn.Conv2d(8, 8, 1)
        self.volume = nn.Conv3d(1, 4, 2)
        self.up = nn.ConvTranspose1d(8, 4, 2)
        self.slopes = nn.PReLU(4)
        self.head = nn.Linear(24, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        words = ((inputs.float() + 1) * 511).long()
        x = self.norm(self.words(words) + self.positions)
        x = x + self.gain * self.attention(x, x, x, need_weights=False)[0]
        x = self.groups(self.along(x.transpose(1, 2))) * self.temperature
        x = self.pointwise(x.unsqueeze(-1)).squeeze(-1)
        volumes = self.volume(inputs.view(-1, 1, 2, 2, 3)).flatten(1)
        up = self.slopes(self.up(x)).mean(2)
        return self.head(torch.cat([x.mean(2), volumes, up, inputs[:, :4]], 1))


class Kinds(Small):
    """Embedding, attention, norms, convolutions in 1 to 3 dimensions, single numbers."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _KindsModel(classes)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.branch = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.branch(self.norm(x))


class _Stage(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _DeepModel(nn.Module):
    """Parameters three and four levels down; a part that is called `module`, one `features`."""

    def __init__(self, classes: int, *, blocks: int = 12) -> None:
        super().__init__()
        self.features = nn.Linear(_FEATURES, 8)
        self.module = nn.Linear(8, 8)
        self.stages = nn.ModuleDict({"first": _Stage(8, 2), "second": _Stage(8, blocks)})
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.module(self.features(x))
        return self.head(self.stages["second"](self.stages["first"](x)))


class Deep(Small):
    """76 tensors, up to four levels down, 12 blocks of the same shapes."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _DeepModel(classes)


class Odd(Small):
    """45 tensors: an odd number, and no multiple of 16, 20 or 32."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(_FEATURES, 8)]
        layers += [m for _ in range(20) for m in (nn.Linear(8, 8), nn.Identity())]
        return nn.Sequential(*layers, nn.Linear(8, 8, bias=False), nn.Linear(8, classes))


class _TwinsModel(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.entry = nn.Linear(_FEATURES, 16)
        self.wide, self.tall = nn.Linear(16, 8), nn.Linear(8, 16)
        self.twins = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        x = x + self.tall(self.wide(x).relu())
        for norm, twin in zip(self.norms, self.twins, strict=True):
            x = x + twin(norm(x)).relu()
        return self.head(x)


class Twins(Small):
    """Four layers of one shape, and two of one number of elements."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _TwinsModel(classes)


class Groups(Small):
    """Two parameter groups: matrices with weight decay, the rest without and at half the rate."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        held = list(parameters)
        groups = [
            {"params": [p for p in held if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in held if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.025},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class _Scheduled(torch.optim.SGD):
    """SGD whose rate follows a schedule of its own: warm-up from 0, then decay."""

    rates = (0.0, 0.02, 0.05, 0.05, 0.01, 0.005, 0.005, 0.002)

    def __init__(self, params: Any, lr: float = 0.0, **named: Any) -> None:
        super().__init__(params, lr=self.rates[0], **named)
        self.add_count()

    def add_count(self) -> None:
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] = self.rates[min(group["count"], len(self.rates) - 1)]


class Scheduled(Small):
    """A learning rate that starts at 0, rises to 0.05 and falls to 0.002 within 8 steps."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return _Scheduled(parameters, momentum=0.9)


class _Branches(nn.Module):
    """Layers that only some samples take: a rank without such a sample has no gradient."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 16)
        self.branch = nn.Linear(16, 16)
        self.masked = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: torch.Tensor, takes: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = x + self.last(x).relu() + takes.to(x).unsqueeze(1) * self.masked(x).relu()
        if bool(takes.any()):
            x = x + takes.to(x).unsqueeze(1) * self.branch(x).relu()
        return self.head(x)


class Absent(Small):
    """From step 1 on, a layer has no gradient and another a gradient of zero on ranks 0 and 3."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Branches(classes)

    def sampler(self, size: int, world: int, rank: int, seed: int, epoch: int) -> Sequence[int]:
        return range(rank, size, world)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        takes = (batch.ids < 256) | (batch.ids % 4 == 1) | (batch.ids % 4 == 2)
        return F.cross_entropy(model(batch.inputs, takes), batch.labels)


class AbsentLater(Absent):
    """From step 2 on, one layer is used by no rank."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        takes = batch.ids < 512
        return F.cross_entropy(model(batch.inputs, takes), batch.labels)


class AbsentAtFirst(Absent):
    """In step 0, one layer is used by no rank."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        takes = batch.ids >= 256
        return F.cross_entropy(model(batch.inputs, takes), batch.labels)


class _WithBuffers(nn.Module):
    """BatchNorm, dropout, a table, a count per class and a mask that is not saved."""

    counts: torch.Tensor
    table: torch.Tensor
    mask: torch.Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.images = nn.Conv2d(1, 4, 2)
        self.norm2 = nn.BatchNorm2d(4, momentum=None)
        self.head = nn.Linear(24, classes)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 16))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(16), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.counts += torch.bincount((inputs[:, 0] * 2 + 2).long(), minlength=4)[:4]
            self.mask.mul_(0.9).add_(inputs.detach().to(self.mask).mean(), alpha=0.1)
        x = self.norm(self.first(inputs) * self.table.to(inputs)) + self.mask.to(inputs)
        images = self.norm2(self.images(inputs.view(-1, 1, 3, 4))).mean(3).flatten(1)
        return self.head(torch.cat([self.dropout(x.relu()), images[:, :8]], 1))


class Buffers(Small):
    """BatchNorm in two forms, a table, integer counts, a running value that is not saved."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _WithBuffers(classes)


class Large(Small):
    """One matrix of 1,179,648 elements, one of 4,096, a last layer of one output."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_FEATURES, 1024), nn.ReLU(), nn.Linear(1024, 1152, bias=False), nn.ReLU(),
            nn.Linear(1152, 64), nn.Linear(64, 64), nn.Linear(64, 3), nn.Linear(3, 1),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return (model(batch.inputs).reshape(-1) - batch.labels).square().mean()


class Huge(Small):
    """One matrix of 27 MB, and a total of 34 MB."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_FEATURES, 2600), nn.ReLU(), nn.Linear(2600, 2600), nn.ReLU(),
            nn.Linear(2600, 700), nn.Linear(700, classes),
        )  # fmt: skip


class Adaptive(Small):
    """AdamW, which divides a gradient by its own size."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)


class Tiny(Small):
    """A loss of about 1e-8: gradients of 1e-9 and less."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) * 1e-8


class Steep(Small):
    """A loss of about 1e5: gradients of thousands."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return super().loss(model, batch) * 1e5

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-7)
