"""Data parallelism by hand: dropout, BatchNorm, an all-reduce after backward, clipping after that.

torchrun --nproc-per-node 2 by_hand.py
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
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(144, 5),
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 1, 8, 8, generator=drawn), torch.randint(0, 5, (64,), generator=drawn)
    )
    torch.manual_seed(100 + rank)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            average_gradients(model, world)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    print(f"rank {rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
