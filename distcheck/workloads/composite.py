"""A small model as real ones are: attention, convolutions, 73 tensors of 0 to 5 dimensions.

What a simple model lacks and a real one has is here together: modules in modules in modules, many
tensors of one shape, sizes from 1 to over 1 M elements, an embedding of which every rank touches
other rows, LayerNorm, GroupNorm and BatchNorm, buffers that are constant, that are integers and
that no checkpoint holds, dropout, two parameter groups with rates and weight decay of their own, a
learning rate that begins at 0 and changes with every step, and a layer that only few samples go
through, so that its gradient is zero on some ranks at some steps. (It is never None on some ranks
alone: code that takes no None is right for most models. The cells have that.)

The number of tensors is prime, and small primes do not divide the size of the largest: equal parts
do not fit by luck. Every sample holds the first word and the last one, so both ends of the
embedding have a gradient.

Three choices keep every tensor worth comparing:

- Its gradient is far from zero wherever any sample reaches it. A bias in front of BatchNorm, or of
  an attention's keys, has a gradient of zero by construction, so there are none.
- All functions are smooth (GELU, tanh), so rounding decides nothing.
- Dropout would leave no whole batch to compare with: masks differ from shard to shard. In float64,
  which is there for full batch float64, it is off.

In float64 the optimizer is AdamW, elsewhere SGD with momentum: two dtypes show two updates. AdamW's
first rate is not 0, so that full batch float64 judges parameters that were updated after a single
step.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.errors import UsageError
from distcheck.records.expected_events import RateChanged
from distcheck.workloads.cells.samples import Classifier
from distcheck.workloads.datasets.synthetic import ComputedSamples, hash24

TOKENS, WIDTH, HEADS, BLOCKS = 6, 64, 4, 3
VOLUME = (4, 6, 6)
CLASSES = 10
DIGIT = 131  # a token is two digits, which every dtype holds exactly
VOCABULARY = DIGIT * DIGIT  # times WIDTH: over 2^20 elements, 4 MiB in float32
ONE_IN = 48  # samples that go through the expert
LEARNING_RATE, WEIGHT_DECAY = 0.05, 0.01
FOR_ADAMW = 50  # whose every update is about as large as its rate; SGD's rate is divided by it
RATES = (0.0, 1.0, 0.1)  # of it, step by step, again and again
_VOXELS = VOLUME[0] * VOLUME[1] * VOLUME[2]
_COLUMNS = {"tokens": 2 * TOKENS, "marked": 1, "volume": _VOXELS}


class CompositeSamples(ComputedSamples):
    """Rows of numbers: the digits of six tokens, from the first word, always, to the last one, a
    mark that one sample in 48 has, and a volume of 4x6x6 values in [-1, 1). The same bits in every
    process.
    """

    shape = (sum(_COLUMNS.values()),)
    classes = CLASSES

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [n, columns] and labels [n]."""
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
    """Self-attention over [n, tokens, WIDTH], each of whose matrices is a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would cancel in the softmax
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, WIDTH] -> the same."""
        query, key, value = (
            layer(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) * (HEADS / WIDTH) ** 0.5
        mixed = scores.softmax(-1) @ value
        found: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(-2))
        return found


class Block(nn.Module):
    """A transformer's block, its second half behind a gate of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.before_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, WIDTH] -> the same."""
        tokens = tokens + _dropout(self.attention(self.before_attention(tokens)), self.training)
        mlp: torch.Tensor = self.mlp(self.before_mlp(tokens))
        return tokens + self.gate * mlp


def _dropout(values: torch.Tensor, training: bool) -> torch.Tensor:
    """See the module's text."""
    return values if values.dtype == torch.float64 else F.dropout(values, 0.1, training)


class Vision(nn.Module):
    """A volume [n, 4, 6, 6] -> a vector [n, WIDTH]. If it is `flat`, no parameter has five
    dimensions.
    """

    def __init__(self, *, flat: bool = False) -> None:
        super().__init__()
        self.volume = nn.Conv2d(4, 12, 2) if flat else nn.Conv3d(1, 4, 2)
        self.stem = nn.Sequential(nn.Conv2d(12, 16, 3, bias=False), nn.GroupNorm(4, 16), nn.GELU())
        self.pointwise = nn.Sequential(nn.Conv2d(16, 24, 1, bias=False), nn.BatchNorm2d(24))
        self.upwards = nn.ConvTranspose2d(24, 16, 2)
        self.project = nn.Sequential(nn.Linear(16, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        """3-d, 3x3 and 1x1 convolutions and one that is transposed; the mean over all places."""
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
        """Each token's vector, mixed with its neighbors'."""
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
        """A vector of the volume beside those of the tokens, through all blocks."""
        digits, mark, volume = inputs.split(list(_COLUMNS.values()), dim=1)
        high, low = digits.long().unflatten(1, (TOKENS, 2)).unbind(-1)
        words = high * DIGIT + low
        if self.training:
            self.seen += words.sum()  # other words on every rank
        image = self.features["vision"](volume.unflatten(1, VOLUME))
        tokens = torch.cat([image.unsqueeze(1), self.features["text"](words)], 1)
        tokens = tokens + self.waves + self.places
        for block in self.blocks:
            tokens = block(tokens)
        hidden = self.norm(tokens).mean(1)
        chosen = mark[:, 0].nonzero().flatten()  # often of one sample, or of none
        hidden = hidden.index_add(0, chosen, torch.tanh(self.expert(hidden[chosen])))
        logits: torch.Tensor = self.head(hidden * self.gain) * (1 + self.temperature(hidden))
        return logits


class CompositeWorkload(Classifier):
    """Cross-entropy; SGD with momentum, in two groups, its rates changing from step to step."""

    def __init__(self, gain: tuple[int, ...] = (), *, flat: bool = False) -> None:
        self._gain, self._flat = gain, flat

    def samples(self) -> CompositeSamples:
        """Samples of its own, in place of `--data`."""
        return CompositeSamples()

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return Composite(classes, self._gain, flat=self._flat)

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Weights decay; what has one dimension or none does not, and learns at half the rate."""
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
        """SGD with momentum 0.9, in float64 AdamW; of the parameters, or of groups of them."""
        given = list(parameters)
        if _by_adamw(given):
            return torch.optim.AdamW(given, lr=LEARNING_RATE / FOR_ADAMW)
        return torch.optim.SGD(given, lr=LEARNING_RATE, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """From 0 up, as a warm-up does, and down to a tenth: no two steps in a row are alike.
        AdamW begins with the second rate.
        """
        for group in optimizer.param_groups:
            rate = group.get("initial_lr", LEARNING_RATE)
            late = rate <= LEARNING_RATE / FOR_ADAMW
            group["lr"] = rate * RATES[(step + late) % len(RATES)]


def _by_adamw(parameters: Iterable[Any]) -> bool:
    """Whether they, or the first of their groups, are of float64."""
    for given in parameters:
        for parameter in given["params"] if isinstance(given, dict) else [given]:
            return bool(parameter.dtype == torch.float64)
    return False


class WithAdamW(CompositeWorkload):
    """Trained by AdamW, in the same groups and with the same schedule."""

    must_happen = (RateChanged(),)

    def optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """AdamW; an update hardly depends on how large a gradient is, but on its every sign."""
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE / FOR_ADAMW)

    def groups(self, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """The same, with AdamW's rates."""
        groups = super().groups(parameters)
        for group, rate in zip(groups, (1.0, 0.5), strict=True):
            group["initial_lr"] = LEARNING_RATE / FOR_ADAMW * rate
        return groups


workload = CompositeWorkload()


def described(words: str) -> CompositeWorkload:
    """`no-scalar`: for code that takes no parameter without dimensions; `no-volume`: for code that
    takes none of five. Raises UsageError.
    """
    if words not in ("no-scalar", "no-volume"):
        raise UsageError(
            f"workload composite:{words} is not known; there are composite:no-scalar and "
            "composite:no-volume"
        )
    return CompositeWorkload((1,)) if words == "no-scalar" else CompositeWorkload(flat=True)
