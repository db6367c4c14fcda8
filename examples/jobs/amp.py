"""Mixed precision: bfloat16 autocast in the forward pass, and a GradScaler as for float16.

torchrun --nproc-per-node 2 amp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 5))
    model = DistributedDataParallel(model)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(192, 20, generator=drawn), torch.randint(0, 5, (192,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    if rank == 0:
        print(f"{world} ranks: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
