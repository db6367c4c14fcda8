"""Hybrid sharding: fully_shard in a mesh of two axes, replicas of parts (HSDP).

torchrun --nproc-per-node 4 hsdp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    replicas = 2 if world > 1 else 1
    mesh = init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 20, generator=drawn), torch.randint(0, 5, (64,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
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
