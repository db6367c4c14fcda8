"""Optimizer states divided by hand: each rank steps for its part of the parameters, and hands it on.

torchrun --nproc-per-node 2 sharded_by_hand.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model, world):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    owned = [(p, number % world) for number, p in enumerate(model.parameters())]
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 20, generator=drawn), torch.randint(0, 5, (96,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW([p for p, owner in owned if owner == rank], lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            model.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            average_gradients(model, world)
            optimizer.step()
            for parameter, owner in owned:
                dist.broadcast(parameter.data, owner)
    print(f"rank {rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
