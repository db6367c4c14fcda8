"""Optimizer states divided among the ranks: DistributedDataParallel and ZeroRedundancyOptimizer.

torchrun --nproc-per-node 2 zero.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(),
        torch.nn.Linear(32, 5),
    )  # fmt: skip
    model = DistributedDataParallel(model)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 20, generator=drawn), torch.randint(0, 5, (96,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2, weight_decay=0.1
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch} of {world} ranks: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
