"""A small transformer over the patches of an image, which model-parallel layouts shard.

It has the modules in which sharding errors occur: attention with several heads, LayerNorm, residual
connections, a mean over the tokens. No dropout, and GELU instead of ReLU, so that no branch depends
on rounding.
"""

from collections.abc import Iterable
from math import prod

import torch
import torch.nn.functional as F
from torch import nn

from distcheck.errors import UsageError
from distcheck.workloads.cells.samples import Classifier

TOKENS, WIDTH, HEADS, BLOCKS = 8, 32, 4, 2


class Attention(nn.Module):
    """[n, tokens, width] -> the same shape. Heads are independent, so ranks may share them out."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_size = HEADS, WIDTH // HEADS
        self.queries, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.values, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (
            part(tokens).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        mixed = F.softmax(queries @ keys.transpose(2, 3) / self.head_size**0.5, dim=3) @ values
        outputs: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return outputs


class FeedForward(nn.Module):
    """[n, tokens, width] -> the same shape, each token independently."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.down(F.gelu(self.up(tokens)))
        return outputs


class Block(nn.Module):
    """Attention, then a feed-forward part, each with a LayerNorm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.feed = Attention(), FeedForward()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, tokens, width] -> the same shape."""
        tokens = tokens + self.attention(self.first(tokens))
        outputs: torch.Tensor = tokens + self.feed(self.second(tokens))
        return outputs


class Embed(nn.Module):
    """Splits a sample's numbers into patches, and returns them as tokens with a position."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.patch = nn.Linear(numbers // TOKENS, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) / 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[n, *sample shape] -> [n, tokens, width]."""
        patches = inputs.flatten(1).unflatten(1, (TOKENS, -1))
        tokens: torch.Tensor = self.patch(patches) + self.position
        return tokens


class Transformer(nn.Module):
    """inputs [n, *sample shape] -> logits [n, classes]."""

    def __init__(self, numbers: int, classes: int) -> None:
        super().__init__()
        self.embed = Embed(numbers)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.blocks(self.embed(inputs)))
        logits: torch.Tensor = self.head(tokens.mean(1))
        return logits


class Workload(Classifier):
    """The transformer, trained by AdamW."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the model for samples that can be split into equal patches. Raises UsageError."""
        numbers = prod(sample_shape)
        if numbers % TOKENS:
            raise UsageError(
                f"workload transformer cuts a sample into {TOKENS} patches, and {numbers} numbers "
                f"of shape {sample_shape} do not divide by {TOKENS}"
            )
        return Transformer(numbers, classes)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)


workload = Workload()
