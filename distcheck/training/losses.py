"""The loss that a strategy's own `backward` computes and returns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch


class LossOfShard:
    """What `backward` is given; see `contract.LossOf`."""

    def __init__(self, loss: Callable[[nn.Module, Batch], torch.Tensor], model: nn.Module) -> None:
        self._loss, self._model = loss, model

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss of what the wrapped model makes of the batch."""
        return self._loss(self._model, batch)

    def given(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss of outputs that were computed already."""
        return self._loss(_Answers(outputs), batch)


class _Answers(nn.Module):
    """Stands for a model whose outputs are known."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """The outputs, whatever it is called with."""
        return self._outputs


def check_returned(returned: Any, *, may_lack: bool) -> None:
    """Raises TypeError for what a strategy's `backward` may not return: anything but the loss, or
    None where a rank may lack it.
    """
    if isinstance(returned, torch.Tensor) or (returned is None and may_lack):
        return
    or_none = ", or None on a rank that does not have it" if may_lack else ""
    raise TypeError(
        f"the strategy's backward() must return the shard's mean loss, a tensor{or_none}, and "
        f"returned {returned!r}"
    )
