"""What the server of `warm.py` imports before it forks the first command."""

import gc
import importlib
import os
import pkgutil

import distcheck.machine.seeds

os.environ.update(distcheck.machine.seeds.PINNED_ENVIRONMENT)  # read when torch is imported

import torch
import torch._dynamo
import torch.distributed
import torch.utils.data

import distcheck.cli
import tests.world.warm
from distcheck.worlds.local.forks import move_to_huge_pages

# What a verification imports by and by, in its front and again in each rank and judge.
for name in ("cli", "judge", "plan", "recordings", "reports", "store", "training", "verification"):
    package = importlib.import_module(f"distcheck.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

# As the helper does it: what is forked neither collects what it inherited nor copies its tables.
gc.collect()
gc.freeze()
move_to_huge_pages()

__all__ = ["distcheck", "tests", "torch"]
