"""What the server of `warm.py` imports before it forks the first command."""

import gc
import os

import distcheck.machine.seeds

os.environ.update(distcheck.machine.seeds.PINNED_ENVIRONMENT)  # read when torch is imported

import torch
import torch._dynamo
import torch.distributed
import torch.utils.data

import distcheck.cli
import distcheck.cli.commands.verify
import distcheck.verification.session
import tests.world.warm
from distcheck.worlds.local.forks import gather_memory

# As the helper does it: what is forked neither collects what it inherited nor copies its tables.
gc.collect()
gc.freeze()
gather_memory()

__all__ = ["distcheck", "tests", "torch"]
