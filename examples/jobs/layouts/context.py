"""Context parallelism by hand: each rank has some of a sample's tokens, and gathers the keys and
values of all.

torchrun --nproc-per-node 2 context.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 2, 32, 8


class Gather(torch.autograd.Function):
    """Forward: the tokens of all ranks. Backward: what all ranks found for this rank's."""

    @staticmethod
    def forward(ctx, tokens):
        parts = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tokens.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        own, first = x.shape[1], dist.get_rank() * x.shape[1]
        normed = self.norm1(x)
        several = self.q(normed), *Gather.apply(self.kv(normed)).chunk(2, 2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in several)
        sees = torch.arange(k.shape[2]) <= torch.arange(first, first + own)[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.logits = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=mesh.get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(10):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=drawn)
        inputs = tokens[:, :-1].chunk(mesh.size(), 1)[mesh.get_local_rank()]
        targets = tokens[:, 1:].chunk(mesh.size(), 1)[mesh.get_local_rank()]
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
