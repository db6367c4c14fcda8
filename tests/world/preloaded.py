"""What the server of `warm.py` imports before it forks the first command."""

import os

import distcheck.seeds

os.environ.update(distcheck.seeds.PINNED_ENVIRONMENT)  # read when torch is imported

import torch
import torch._dynamo
import torch.distributed
import torch.utils.data

import distcheck.cli
import distcheck.commands.verify
import distcheck.session
import tests.world.warm

__all__ = ["distcheck", "tests", "torch"]
