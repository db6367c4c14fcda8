"""Which positions of a batch its loss is over, where the workload counts tokens."""

from dataclasses import replace
from typing import Any

import torch

from distcheck.contract import Batch
from distcheck.errors import UsageError


def counts_tokens(workload: Any) -> bool:
    """Whether the workload says which positions its loss is over."""
    return hasattr(workload, "tokens")


def with_tokens(workload: Any, name: str, batch: Batch) -> Batch:
    """The batch, with the real positions of each sample where the workload says them. Raises
    UsageError for what is not a table of them.
    """
    if not counts_tokens(workload):
        return batch
    found = workload.tokens(batch)
    rows = len(batch.ids)
    if not isinstance(found, torch.Tensor) or found.dtype is not torch.bool:
        kind = str(found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
        raise UsageError(
            f"workload {name}: tokens(batch) returned {kind}; it must return a bool tensor "
            "[n, positions], True where the loss counts a position"
        )
    if found.dim() < 1 or found.shape[0] != rows:
        raise UsageError(
            f"workload {name}: tokens(batch) returned the shape {tuple(found.shape)} for {rows} "
            "samples; it must return a bool tensor [n, positions]"
        )
    return replace(batch, real=found.reshape(rows, -1))
