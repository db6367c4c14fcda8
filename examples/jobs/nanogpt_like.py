"""A script in the manner of nanoGPT's train.py: batches by hand, accumulation, clipping, a warm-up.

torchrun --nproc-per-node 2 nanogpt_like.py
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

vocabulary, block_size, width = 31, 16, 24
batch_size, gradient_accumulation_steps = 4, 12
max_iters, warmup_iters, learning_rate, grad_clip = 12, 4, 1e-2, 0.5


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block_size, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, idx, targets):
        x = self.tokens(idx) + self.places(torch.arange(idx.shape[1]))
        q, k, v = self.attention(self.norm1(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.feed(self.norm2(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))
        return logits, loss


def get_batch(data):
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in starts])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * ratio))


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("gloo")
    ddp_rank, ddp_world_size = dist.get_rank(), dist.get_world_size()
    master_process, seed_offset = ddp_rank == 0, ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, seed_offset, ddp_world_size = True, 0, 1

data = torch.randint(vocabulary, (20_000,), generator=torch.Generator().manual_seed(7))
torch.manual_seed(1337)
model = GPT()
torch.manual_seed(1337 + seed_offset)
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))

X, Y = get_batch(data)
for iter_num in range(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            last = micro_step == gradient_accumulation_steps - 1
            model.require_backward_grad_sync = last
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch(data)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, lr {lr:.5f}")
if ddp:
    dist.destroy_process_group()
