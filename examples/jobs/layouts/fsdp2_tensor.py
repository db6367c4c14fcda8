"""Data x tensor parallelism: parallelize_module, then fully_shard, in a mesh of two axes.

torchrun --nproc-per-node 4 fsdp2_tensor.py --tp 2
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.into = nn.Linear(20, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    tp = parser.parse_args().tp
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Net()
    whole = ColwiseParallel(output_layouts=Replicate())
    plan = {"into": whole, "out": whole}
    plan |= {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 20, generator=drawn), torch.randint(0, 6, (64,), generator=drawn)
    )
    sampler = DistributedSampler(data, mesh["dp"].size(), mesh["dp"].get_local_rank())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
