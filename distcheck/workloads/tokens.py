"""A small language model over sequences of different lengths, whose loss is averaged over tokens.

Each position predicts the next token. A sequence is padded to the length of the longest, and the
loss is the mean over the real targets of the batch, so a rank must be weighted by its tokens and
not by its samples. One sequence in eight is long, one has no target at all, and the others are
short. Shards therefore have very different numbers of tokens, and a small shard may have none.

Attention is causal, so padding at the end changes no target's logits. The keys have no bias, which
would cancel in the softmax. GELU and no dropout, as in `transformer`.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.contract import Batch
from distcheck.records.expected_events import PaddedPositions
from distcheck.workloads.datasets.synthetic import ComputedSamples, hash24

LENGTH, VOCABULARY = 16, 64  # token numbers that every dtype represents exactly
WIDTH, HEADS, BLOCKS = 32, 4, 2
PADDING = 0  # the padding token
IGNORED = -100  # the target that the loss ignores, torch's default in cross_entropy
_ONE_IN, _SHORT = 8, 5


class Sequences(ComputedSamples):
    """Sample i: tokens, and the next token at each position. The same in every process."""

    shape = (LENGTH,)
    classes = VOCABULARY

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [n, LENGTH] as numbers, and targets [n, LENGTH]."""
        rows = self.rows(ids, train=train)
        numbers = hash24(rows.unsqueeze(1) * 1021 + torch.arange(LENGTH + 1))
        tokens = 1 + numbers % (VOCABULARY - 1)
        # One more than the number of targets: the last token of a sequence has none.
        kind = hash24(rows * 8191 + 1)
        targets = torch.where(kind % _ONE_IN == 0, LENGTH, 1 + kind // _ONE_IN % _SHORT)
        targets = torch.where(kind % _ONE_IN == 1, 0, targets).unsqueeze(1)
        place = torch.arange(LENGTH)
        inputs = tokens[:, :-1].where(place <= targets, PADDING)
        return inputs.to(dtype), tokens[:, 1:].where(place < targets, IGNORED)


class Attention(nn.Module):
    """[n, tokens, width] -> the same shape; a token attends to itself and to earlier tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            part(tokens).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        scores = queries @ keys.transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        mixed = F.softmax(scores.masked_fill(later, -torch.inf), dim=3) @ values
        outputs: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return outputs


class Block(nn.Module):
    """Attention, then a feed-forward part, each with a LayerNorm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, width] -> the same shape."""
        tokens = tokens + self.attention(self.first(tokens))
        outputs: torch.Tensor = tokens + self.down(F.gelu(self.up(self.second(tokens))))
        return outputs


class LanguageModel(nn.Module):
    """inputs [n, LENGTH] -> logits [n, LENGTH, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token, at every position."""
        tokens = self.embedding(inputs.long()) + self.position
        logits: torch.Tensor = self.head(self.norm(self.blocks(tokens)))
        return logits


class Workload:
    """The language model, trained by AdamW."""

    must_happen = (PaddedPositions(),)

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return LanguageModel()

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the cross-entropy, averaged over the real targets; 0 if there are none."""
        logits = model(batch.inputs).flatten(0, 1)
        targets = batch.labels.flatten()
        total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        return total / max(1, batch.tokens)

    def tokens(self, batch: Batch) -> torch.Tensor:
        """Return a bool mask [n, LENGTH] of the targets that are not padding."""
        return batch.labels != IGNORED

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    def samples(self) -> Sequences:
        return Sequences()


workload = Workload()
