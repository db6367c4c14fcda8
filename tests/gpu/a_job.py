"""A training job on a GPU, which ranks share where there are more of them.

torchrun --nproc-per-node 2 a_job.py BACKEND cuda|cpu
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(backend, kind):
    device = torch.device(kind)
    if kind == "cuda":
        torch.cuda.init()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 8 * 8, 10),
    ).to(device)  # fmt: skip
    model = DistributedDataParallel(model)
    torch.manual_seed(rank)  # each rank its own dropout masks
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(256, 3, 32, 32, generator=drawn), torch.randint(0, 10, (256,), generator=drawn)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} of {world} ranks on {device}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
