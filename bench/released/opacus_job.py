"""A whole job that draws its batches by opacus' distributed sampler.

    torchrun --nproc-per-node 2 opacus_job.py RATE

At a low rate some rank draws nothing in some step, and at a high one that does not happen.
"""

import sys

import torch
import torch.distributed as dist
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch import nn

STEPS = 12


def main() -> None:
    """Trains."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs, targets = torch.randn(64, 4), torch.randn(64, 1)
    data = torch.utils.data.TensorDataset(inputs, targets)
    sampler = DistributedUniformWithReplacementSampler(
        total_size=64, sample_rate=float(sys.argv[1]), steps=STEPS,
        generator=torch.Generator().manual_seed(rank),
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch, target in loader:
        optimizer.zero_grad()
        (model(batch) - target).square().sum().backward()
        optimizer.step()
    dist.barrier()


if __name__ == "__main__":
    main()
