"""What a model's forward pass returns for each sample: seen where the loss is computed of it.

No forward pass is run for it. A hook looks at the calls that the loss makes anyway, and is removed
when the loss has returned. Nothing is drawn, and the tensors are copied, not kept.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distcheck.machine.compat import tree_leaves
from distcheck.training.whole_tensors import whole

MOST_NUMBERS = 1024  # that are kept of a sample; of more, every k-th


def per_sample(made: Any, samples: int) -> torch.Tensor | None:
    """[samples, numbers] of what calls have returned; None where nothing in it has a row of
    floating-point numbers for each sample.
    """
    rows = []
    for leaf in tree_leaves(made):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 1 or leaf.shape[0] != samples:
            continue
        if leaf.is_floating_point() or leaf.is_complex():
            full = whole(leaf.detach())
            assert full is not None, "it is a tensor"
            rows.append(full.reshape(samples, -1))
    if not rows or not samples:
        return None
    wide = torch.cat(rows, dim=1)
    if not wide.shape[1]:
        return None
    return wide[:, :: -(-wide.shape[1] // MOST_NUMBERS)].clone()


class Calls:
    """What the calls of a model have returned so far: one table for each of them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._tables: list[torch.Tensor] = []

    def note(self, module: nn.Module, inputs: Any, made: Any) -> None:
        """A forward hook. What is returned may be changed in place later, so it is copied."""
        table = per_sample(made, self._samples)
        if table is not None:
            self._tables.append(table)

    @property
    def rows(self) -> torch.Tensor | None:
        """[samples, numbers] of all calls, in their order; None where they returned none."""
        return per_sample(self._tables, self._samples)


@contextlib.contextmanager
def calls_of(model: nn.Module, samples: int) -> Iterator[Calls]:
    """While it is entered, keeps what calls of the model return for `samples` samples."""
    calls = Calls(samples)
    hook = model.register_forward_hook(calls.note)
    try:
        yield calls
    finally:
        hook.remove()
