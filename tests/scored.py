"""Small language models in three styles, their scores by other code than distcheck's, and mistakes.

Llama: RMSNorm, rotary positions, gated MLP. Qwen2: the same with biases of the projections and tied
embeddings. GPT-2: LayerNorm, learned positions, GELU, dropout.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

STYLES = ("llama", "qwen2", "gpt2")
VOCABULARY, WIDTH, HEADS, LAYERS, MOST = 64, 32, 4, 2, 128
Logprobs = list[torch.Tensor]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = (positions[:, None, :, None].float() * rates).to(x.dtype)
    one, two = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Layer(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.style, is_gpt2 = style, style == "gpt2"
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if is_gpt2 else RMSNorm() for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=style != "llama")
        self.out = nn.Linear(WIDTH, WIDTH, bias=is_gpt2)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=is_gpt2)
        self.gate = None if is_gpt2 else nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=is_gpt2)
        self.drop = nn.Dropout(0.1 if is_gpt2 else 0.0)
        self.kernel = "eager"

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads = (*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = self.qkv(self.norms[0](x)).view(heads).permute(2, 0, 3, 1, 4)
        if self.style != "gpt2":
            q, k = rotated(q, positions), rotated(k, positions)
        x = x + self.drop(self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2)))
        hidden = self.norms[1](x)
        up = (
            F.gelu(self.up(hidden))
            if self.gate is None
            else F.silu(self.gate(hidden)) * self.up(hidden)
        )
        return x + self.drop(self.down(up))

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        if self.kernel == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1)
        return weights @ v


class Model(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(MOST, WIDTH) if style == "gpt2" else None
        self.layers = nn.ModuleList(Layer(style) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH) if style == "gpt2" else RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if style == "qwen2":
            self.head.weight = self.embedding.weight

    def forward(
        self, ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None
    ) -> torch.Tensor:
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask
        places = torch.arange(ids.shape[1]).expand_as(ids) if position_ids is None else position_ids
        x = self.embedding(ids)
        x = x if self.places is None else x + self.places(places)
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        own = torch.eye(ids.shape[1], dtype=torch.bool)  # padding attends to itself
        allowed = (causal & mask.bool()[:, None, None, :]) | own
        for layer in self.layers:
            x = layer(x, allowed, places)
        return self.head(self.norm(x))


def model_of(style: str) -> Model:
    """A model whose distributions are neither flat nor certain, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Model(style)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    scale = 0.25 if "embedding" in name or "head" in name else 0.15
                    parameter.normal_(0, 2 * scale)
    return model.eval()


@torch.no_grad()
def sampled(model: nn.Module, lengths: tuple[int, ...] = (60, 41, 52, 60, 33, 47)) -> Logprobs:
    """Sequences that the model generates with top-p 0.9."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (len(lengths), 1), generator=generator)
    while ids.shape[1] < max(lengths):
        kept = nucleus(model(ids)[:, -1], 0.9).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(kept, 1, generator=generator)], 1)
    return [row[:n] for row, n in zip(ids, lengths, strict=True)]


def nucleus(logits: torch.Tensor, p: float) -> torch.Tensor:
    """Logits without the tokens beyond the probability p."""
    order = logits.argsort(-1, descending=True)
    likely = logits.softmax(-1).gather(-1, order)
    dropped = (likely.cumsum(-1) - likely) >= p
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


@torch.no_grad()
def scored(
    model: Callable[..., torch.Tensor], given: Logprobs, *, temperature: float = 1.0,
    left: int = 0, is_masked: bool = True, positions: Any = None,
    of: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Logprobs:  # fmt: skip
    """Log-probabilities one sequence at a time, with `left` tokens of padding at the left; without
    any, no mask either.
    """
    found, pad = [], left
    for ids in given:
        padded = torch.cat([torch.zeros(pad, dtype=torch.int64), ids])[None]
        extra = {}
        if pad and is_masked:
            mask = (torch.arange(padded.shape[1]) >= pad).long()[None]
            extra = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
        if positions is not None:
            extra = {"position_ids": positions(padded.shape[1])[None]}
        logits = model(padded, **extra)[0, pad:-1]
        found.append(
            torch.log_softmax(of(logits) / temperature, -1).gather(-1, ids[1:, None])[:, 0]
        )
    return found
