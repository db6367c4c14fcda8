"""A script on Lightning Fabric: it wraps the model, shards the loader, clips and accumulates.

torchrun --nproc-per-node 2 with_fabric.py
"""

import os

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric, seed_everything
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(
        accelerator="cpu", strategy="ddp", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    )
    fabric.launch()
    rank, world = fabric.global_rank, fabric.world_size
    seed_everything(0, verbose=False)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(128, 20, generator=drawn), torch.randint(0, 5, (128,), generator=drawn)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    accumulate = 2
    for epoch in range(2):
        for number, (inputs, labels) in enumerate(loader):
            last = (number + 1) % accumulate == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = F.cross_entropy(model(inputs), labels)
                fabric.backward(loss / accumulate)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch} of {world} ranks: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
