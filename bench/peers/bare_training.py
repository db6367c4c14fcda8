"""Bare VGG11 training: plain PyTorch, one all_reduce per parameter, nothing recorded.

    torchrun --nproc-per-node 4 bare_training.py STEPS        a world
    python bare_training.py STEPS                             one process

Prints the seconds that its slowest rank spent in the steps, nothing else.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH = 256


def vgg11() -> nn.Module:
    """VGG11 with BatchNorm for 3x32x32 images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(True)]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def main(steps: int) -> None:
    """Trains and prints the seconds."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = vgg11()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(BATCH // world, 3, 32, 32), torch.randint(0, 10, (BATCH // world,))
    if world > 1:
        dist.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
    spent = torch.tensor([time.perf_counter() - begun])
    if world > 1:
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    if int(os.environ.get("RANK", "0")) == 0:
        print(float(spent), flush=True)
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads can abort a rank that ends while its peers are ending


if __name__ == "__main__":
    main(int(sys.argv[1]))
