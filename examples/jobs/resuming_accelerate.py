"""A script on accelerate that saves its state after some steps, and resumes from it.

torchrun --nproc-per-node 2 resuming_accelerate.py --save-at 3
torchrun --nproc-per-node 2 resuming_accelerate.py --resume state
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """How far the training is, which `save_state` saves as well."""

    def __init__(self):
        self.step = self.epoch = self.batches = 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, saved):
        vars(self).update(saved)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--resume", default="")
    asked = parser.parse_args()
    accelerator = Accelerator(
        step_scheduler_with_optimizer=False, cpu=True,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    set_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 5)
    )
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(80, 20, generator=drawn), torch.randint(0, 5, (80,), generator=drawn)
    )
    loader = DataLoader(data, batch_size=8, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 6))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if asked.resume:
        accelerator.load_state(asked.resume)
    for epoch in range(progress.epoch, 3):
        loader.set_epoch(epoch)
        rest = loader
        if progress.batches:
            rest = accelerator.skip_first_batches(loader, progress.batches)
        for inputs, labels in rest:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            progress.step += 1
            progress.batches += 1
            if progress.step == asked.save_at:
                accelerator.save_state("state")
        progress.epoch, progress.batches = epoch + 1, 0


if __name__ == "__main__":
    main()
