"""Bare VGG11 training: plain PyTorch, one all_reduce per parameter, nothing recorded.

    torchrun --nproc-per-node 4 bare_training.py STEPS [DEVICE]     a world; ranks share a GPU
    python bare_training.py STEPS [DEVICE]                          one process

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
WARM = 3  # steps before the clock starts, where a GPU's libraries are loaded and kernels chosen


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


def now(device: str) -> float:
    """The clock, when all that was asked of a GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main(steps: int, device: str) -> None:
    """Trains and prints the seconds."""
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = vgg11().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    images, labels = torch.randn(BATCH // world, 3, 32, 32), torch.randint(0, 10, (BATCH // world,))
    images, labels = images.to(device), labels.to(device)
    if world > 1:
        dist.barrier()
    warm = WARM if device == "cuda" else 0
    for number in range(-warm, steps):
        if number == 0:
            begun = now(device)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        if world > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
    spent = torch.tensor([now(device) - begun])
    if world > 1:
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    if int(os.environ.get("RANK", "0")) == 0:
        print(float(spent), flush=True)
    if world > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads can abort a rank that ends while its peers are ending


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
