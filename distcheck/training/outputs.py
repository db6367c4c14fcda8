"""A model's output for each sample, observed when the loss is computed.

No extra forward pass is run. A hook observes the calls that the loss makes anyway, and is removed
when the loss has returned. No random numbers are consumed. Tensors are copied.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distcheck.machine.compat import tree_leaves
from distcheck.training.whole_tensors import as_full_tensor

MOST_NUMBERS = 1024  # kept of a sample; of more, every k-th


def outputs_per_sample(made: Any, samples: int) -> torch.Tensor | None:
    """Return outputs as [samples, numbers]; None without one floating-point row per sample."""
    rows = []
    for leaf in tree_leaves(made):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 1 or leaf.shape[0] != samples:
            continue
        if leaf.is_floating_point() or leaf.is_complex():
            full = as_full_tensor(leaf.detach())
            assert full is not None, "it is a tensor"
            rows.append(full.reshape(samples, -1))
    if not rows or not samples:
        return None
    wide = torch.cat(rows, dim=1)
    if not wide.shape[1]:
        return None
    return wide[:, :: -(-wide.shape[1] // MOST_NUMBERS)].clone()


class ModelOutputs:
    """The outputs of a model's calls so far, one table for each call."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._tables: list[torch.Tensor] = []

    def note(self, module: nn.Module, inputs: Any, made: Any) -> None:
        """Record an output, as a forward hook; copied, since the code may change it in place."""
        table = outputs_per_sample(made, self._samples)
        if table is not None:
            self._tables.append(table)

    @property
    def rows(self) -> torch.Tensor | None:
        """Return [samples, numbers] of all calls, in their order; None if there are no outputs."""
        return outputs_per_sample(self._tables, self._samples)


@contextlib.contextmanager
def record_outputs(model: nn.Module, samples: int) -> Iterator[ModelOutputs]:
    """Record the model's outputs for `samples` samples during the block."""
    calls = ModelOutputs(samples)
    hook = model.register_forward_hook(calls.note)
    try:
        yield calls
    finally:
        hook.remove()
