"""A small model with the features of real ones: attention, convolutions, 73 tensors of 0 to 5
dimensions.

It combines features that simple models lack: deeply nested modules, many tensors of one shape,
sizes from 1 to over 1 M elements, an embedding of which every rank uses different rows, LayerNorm,
GroupNorm and BatchNorm, constant, integer and non-persistent buffers, dropout, two parameter groups
with different rates and weight decay, a learning rate that starts at 0 and changes with every step,
and a layer that only few samples use, so that its gradient is zero on some ranks at some steps. (It
is never None on only some ranks: code that does not support None is correct for most models. The
cells cover that.)

The number of tensors is prime, and small primes do not divide the size of the largest, so equal
parts do not fit by chance. Every sample contains the first and the last word of the vocabulary, so
both ends of the embedding have a gradient.

Three choices keep every tensor worth comparing:

- Its gradient is far from zero on every rank with a sample that uses it. A bias in front of
  BatchNorm, or of an attention's keys, would always have a zero gradient, so there are none.
- All functions are smooth (GELU, tanh), so no result depends on the rounding near a kink.
- With dropout, no full batch is comparable, because masks differ between shards. In
  float64, the dtype of full batch float64, dropout is off.

In float64 the optimizer is AdamW, elsewhere SGD with momentum: two dtypes cover two updates.
AdamW's first rate is not 0, so that full batch float64 judges parameters updated by a single step.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.errors import UsageError
from distcheck.records.expected_events import LearningRateChanged
from distcheck.workloads.cells.samples import Classifier
from distcheck.workloads.datasets.synthetic import ComputedSamples, hash24

TOKENS, WIDTH, HEADS, BLOCKS = 6, 64, 4, 3
VOLUME = (4, 6, 6)
CLASSES = 10
DIGIT = 131  # a token is two digits, which every dtype represents exactly
VOCABULARY = DIGIT * DIGIT  # times WIDTH: over 2^20 elements, 4 MiB in float32
ONE_IN = 48  # fraction of samples that go through the expert
LEARNING_RATE, WEIGHT_DECAY = 0.05, 0.01
FOR_ADAMW = 50  # its updates are about as large as its rate; SGD's rate is divided by it
RATES = (0.0, 1.0, 0.1)  # factors of it, step by step, repeated
_VOXELS = VOLUME[0] * VOLUME[1] * VOLUME[2]
_COLUMNS = {"tokens": 2 * TOKENS, "marked": 1, "volume": _VOXELS}


class CompositeSamples(ComputedSamples):
    """Rows of numbers: the digits of six tokens, which include the first and the last word; a mark
    on one sample in 48; and a volume of 4x6x6 values in [-1, 1). Bit-identical in every process.
    """

    shape = (sum(_COLUMNS.values()),)
    classes = CLASSES

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs [n, columns] and labels [n]."""
        rows = self.rows(ids, train=train)
        numbers = hash24(rows.unsqueeze(1) * 1021 + torch.arange(self.shape[0]))
        digits, mark, voxels = numbers.split(list(_COLUMNS.values()), dim=1)
        digits[:, :2], digits[:, -2:] = 0, DIGIT - 1
        inputs = torch.cat(
            [
                (digits % DIGIT).to(dtype),
                (mark % ONE_IN == 0).to(dtype),
                voxels.to(torch.float32).div_(2**23).sub_(1.0).to(dtype),
            ],
            dim=1,
        )
        return inputs, hash24(rows * 8191 + 1) % CLASSES


class Attention(nn.Module):
    """Self-attention over [n, tokens, WIDTH], with a separate layer for each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would cancel in the softmax
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, WIDTH] -> the same shape."""
        query, key, value = (
            layer(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * (HEADS / WIDTH) ** 0.5
        mixed = scores.softmax(-1) @ value
        found: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return found


class Block(nn.Module):
    """A transformer block with a gate of one element on its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, WIDTH] -> the same shape."""
        tokens = tokens + _dropout(self.attention(self.before_attention(tokens)), self.training)
        mlp: torch.Tensor = self.mlp(self.before_mlp(tokens))
        return tokens + self.gate * mlp


def _dropout(values: torch.Tensor, training: bool) -> torch.Tensor:
    """Apply dropout, except in float64; see the module's docstring."""
    return values if values.dtype == torch.float64 else F.dropout(values, 0.1, training)


class Vision(nn.Module):
    """A volume [n, 4, 6, 6] -> a vector [n, WIDTH]; if `flat`, without 5-d parameters."""

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.volume = nn.Conv2d(4, 12, 2) if flat else nn.Conv3d(1, 4, 2)
        self.stem = nn.Sequential(nn.Conv2d(12, 16, 3, bias=False), nn.GroupNorm(4, 16), nn.GELU())
        self.pointwise = nn.Sequential(nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24))
        self.upwards = nn.ConvTranspose2d(24, 16, 2)
        self.project = nn.Sequential(nn.Linear(16, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        """Apply 3-d, 3x3, 1x1 and transposed convolutions, and average over all positions."""
        flat = isinstance(self.volume, nn.Conv2d)
        seen = self.volume(volume if flat else volume.unsqueeze(1))
        maps = torch.tanh(seen if flat else seen.flatten(1, 2))
        maps = F.gelu(self.upwards(F.gelu(self.pointwise(self.stem(maps)))))
        found: torch.Tensor = self.project(maps.mean((2, 3)))
        return found


class Text(nn.Module):
    """Tokens [n, TOKENS] -> [n, TOKENS, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.neighbors = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the vector of each token, mixed with those of its neighbors."""
        found: torch.Tensor = self.neighbors(self.embedding(tokens).transpose(1, 2))
        return torch.tanh(found).transpose(1, 2)


class Composite(nn.Module):
    """inputs [n, columns] -> logits [n, classes]."""

    waves: torch.Tensor
    seen: torch.Tensor

    def __init__(self, classes: int, gain: tuple[int, ...] = (), *, flat: bool = False) -> None:
        super().__init__()
        self.features = nn.ModuleDict({"text": Text(), "vision": Vision(flat=flat)})
        self.places = nn.Parameter(torch.randn(1, TOKENS + 1, WIDTH) / 8)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(gain))
        self.temperature = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 1))
        self.head = nn.Linear(WIDTH, classes)
        angles = torch.arange(TOKENS + 1).unsqueeze(1) / 10 ** (torch.arange(WIDTH) / WIDTH)
        self.register_buffer("waves", angles.sin())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Process the vector of the volume and the vectors of the tokens through all blocks."""
        digits, mark, volume = inputs.split(list(_COLUMNS.values()), dim=1)
        high, low = digits.long().unflatten(1, (TOKENS, 2)).unbind(-1)
        words = high * DIGIT + low
        if self.training:
            self.seen += words.sum()  # different words on every rank
        image = self.features["vision"](volume.unflatten(1, VOLUME))
        tokens = torch.cat([image.unsqueeze(1), self.features["text"](words)], 1)
        tokens = tokens + self.waves + self.places
        for block in self.blocks:
            tokens = block(tokens)
        hidden = self.norm(tokens).mean(1)
        chosen = mark[:, 0].nonzero().flatten()  # often one sample, or none
        hidden = hidden.index_add(0, chosen, torch.tanh(self.expert(hidden[chosen])))
        logits: torch.Tensor = self.head(hidden * self.gain) * (1 + self.temperature(hidden))
        return logits


class CompositeWorkload(Classifier):
    """Cross-entropy; SGD with momentum, in two groups, with rates that change at every step."""

    def __init__(self, gain: tuple[int, ...] = (), *, flat: bool = False) -> None:
        self._gain, self._flat = gain, flat

    def samples(self) -> CompositeSamples:
        return CompositeSamples()

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Composite(classes, self._gain, flat=self._flat)

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Return two groups: weights decay; vectors and scalars do not, at half the rate."""
        listed = list(parameters)
        rate = LEARNING_RATE / (FOR_ADAMW if _by_adamw(listed) else 1)
        return [
            {
                "params": [p for p in listed if p.dim() > 1],
                "weight_decay": WEIGHT_DECAY,
                "initial_lr": rate,
            },
            {
                "params": [p for p in listed if p.dim() <= 1],
                "weight_decay": 0.0,
                "initial_lr": rate / 2,
            },
        ]

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return SGD with momentum 0.9, or AdamW in float64, for parameters or groups of them."""
        given = list(parameters)
        if _by_adamw(given):
            return torch.optim.AdamW(given, lr=LEARNING_RATE / FOR_ADAMW)
        return torch.optim.SGD(given, lr=LEARNING_RATE, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rates: up from 0 as in a warm-up, then down to a tenth, so that
        consecutive steps differ. AdamW begins with the second rate.
        """
        for group in optimizer.param_groups:
            rate = group.get("initial_lr", LEARNING_RATE)
            late = rate <= LEARNING_RATE / FOR_ADAMW
            group["lr"] = rate * RATES[(step + late) % len(RATES)]


def _by_adamw(parameters: Iterable[Any]) -> bool:
    """Return True if they, or the parameters of their first group, are float64."""
    for given in parameters:
        for parameter in given["params"] if isinstance(given, dict) else [given]:
            return bool(parameter.dtype == torch.float64)
    return False


class WithAdamW(CompositeWorkload):
    """The composite workload with AdamW in place of SGD; groups and schedule are the same."""

    must_happen = (LearningRateChanged(),)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """Return AdamW: its updates depend on the sign of a gradient more than on its magnitude."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE / FOR_ADAMW)

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Return the groups of the base class, with AdamW's rates."""
        groups = super().groups(parameters)
        for group, rate in zip(groups, (1.0, 0.5), strict=True):
            group["initial_lr"] = LEARNING_RATE / FOR_ADAMW * rate
        return groups


workload = CompositeWorkload()


def described(words: str) -> CompositeWorkload:
    """Return a variant: `no-scalar` for code that does not support scalar (0-d) parameters,
    `no-volume` for code that does not support five dimensions. Raises UsageError.
    """
    if words not in ("no-scalar", "no-volume"):
        raise UsageError(
            f"workload composite:{words} is unknown; known are composite:no-scalar and "
            "composite:no-volume"
        )
    return CompositeWorkload((1,)) if words == "no-scalar" else CompositeWorkload(flat=True)
