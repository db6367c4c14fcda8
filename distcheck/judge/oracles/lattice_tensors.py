"""Exact numbers of the lattice's closed form as tensors of the trace's shape and dtype."""

from collections.abc import Sequence
from fractions import Fraction

import torch

from distcheck.judge.oracles.lattice import expand
from distcheck.records import TensorSpec


def as_tensor(spec: TensorSpec, values: Sequence[Fraction]) -> torch.Tensor:
    """`values`, which the dtype holds exactly, in the shape of `spec`."""
    floats = torch.frombuffer(expand(spec.name, values), dtype=torch.float64)
    return floats.to(getattr(torch, spec.dtype)).view(spec.shape)
