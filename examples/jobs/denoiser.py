"""A denoiser (diffusion): noise and timesteps are drawn between a batch and its loss, which has two
terms.

torchrun --nproc-per-node 2 denoiser.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TIMESTEPS = 100


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.at = nn.Linear(20, 32), nn.Embedding(TIMESTEPS, 32)
        self.out = nn.Linear(32, 20)

    def forward(self, x, t):
        hidden = F.gelu(self.into(x) + self.at(t))
        return self.out(hidden), hidden


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Denoiser())
    torch.manual_seed(100 + rank)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 20, generator=drawn))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in DataLoader(data, batch_size=8, sampler=sampler):
            noise = torch.randn_like(x)
            t = torch.randint(0, TIMESTEPS, (len(x),))
            keep = torch.linspace(0.99, 0.01, TIMESTEPS)[t, None]
            predicted, hidden = model(keep.sqrt() * x + (1 - keep).sqrt() * noise, t)
            size = hidden.square().mean()
            loss = F.mse_loss(predicted, noise) + 0.1 * size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"rank {rank}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
