"""A training script as many are on GPUs: mixed precision, workers, pinned memory, fused AdamW.

torchrun --nproc-per-node 2 a_usual_job.py BACKEND cuda|cpu float16|bfloat16|fsdp
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __init__(self):
        drawn = torch.Generator().manual_seed(1)
        self.images = torch.randn(128, 3, 32, 32, generator=drawn)
        self.labels = torch.randint(0, 10, (128,), generator=drawn)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, self.labels[index]


def build(how):
    def block(of, to):
        convolution = nn.Conv2d(of, to, 3, padding=1, bias=False)
        norm = nn.GroupNorm(4, to) if how == "fsdp" else nn.BatchNorm2d(to)
        return nn.Sequential(convolution, norm, nn.ReLU(inplace=True))

    return nn.Sequential(
        block(3, 16), nn.MaxPool2d(2), block(16, 32), nn.MaxPool2d(2), block(32, 32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, 10),
    )  # fmt: skip


def main(backend, kind, how):
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layout = torch.contiguous_format if how == "fsdp" else torch.channels_last
    model = build(how).to(device, memory_format=layout)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, 0)
    if how == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            if any(True for _ in block.parameters()):
                fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    else:
        ids = [device.index] if kind == "cuda" else None
        model = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    dtype = torch.float16 if how == "float16" else torch.bfloat16
    data = Images()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(
        data, batch_size=16, sampler=sampler, num_workers=2, pin_memory=kind == "cuda",
        persistent_workers=True, drop_last=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=16)
    scaler = torch.amp.GradScaler(kind, enabled=how == "float16" and kind == "cuda")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=layout)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(kind, dtype, enabled=how != "fsdp"):
                loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
