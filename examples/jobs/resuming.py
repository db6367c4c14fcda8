"""A script that saves after some steps, and resumes: all that a training holds is in the checkpoint.

torchrun --nproc-per-node 2 resuming.py --save-at 3
torchrun --nproc-per-node 2 resuming.py --resume checkpoint.pt
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--norm", type=int, default=1)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(32) if asked.norm else torch.nn.LayerNorm(32)
    net = torch.nn.Sequential(
        torch.nn.Linear(20, 32), norm, torch.nn.Tanh(), torch.nn.Dropout(asked.dropout),
        torch.nn.Linear(32, 5),
    )  # fmt: skip
    average = copy.deepcopy(net).requires_grad_(False)
    model = DistributedDataParallel(net)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(80, 20, generator=drawn), torch.randint(0, 5, (80,), generator=drawn)
    )
    sampler = DistributedSampler(data, seed=3)
    # With a generator of its own: it draws when an epoch begins, and dropout is to draw as before.
    own = torch.Generator()
    loader = DataLoader(data, batch_size=asked.batch, sampler=sampler, generator=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 6))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    torch.manual_seed(100 + rank)
    step = first_epoch = skip = 0
    if asked.resume:
        saved = torch.load(asked.resume, weights_only=False)
        net.load_state_dict(saved["model"])
        average.load_state_dict(saved["average"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        scaler.load_state_dict(saved["scaler"])
        step, first_epoch, skip = saved["step"], saved["epoch"], saved["batches"]
        if rank < len(saved["random"]):
            torch.set_rng_state(saved["random"][rank])
    for epoch in range(first_epoch, 3):
        sampler.set_epoch(epoch)
        for number, (inputs, labels) in enumerate(loader):
            if number < skip:
                continue
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            for kept, now in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(now.detach(), 0.1)
            step += 1
            if step == asked.save_at:
                random = [None] * world
                dist.all_gather_object(random, torch.get_rng_state())
                saved = {
                    "model": net.state_dict(),
                    "average": average.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "scaler": scaler.state_dict(),
                    "step": step, "epoch": epoch, "batches": number + 1, "random": random,
                }  # fmt: skip
                if rank == 0:
                    torch.save(saved, "checkpoint.pt")
        skip = 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
