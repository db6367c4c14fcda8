"""The loss that a strategy's own `backward` computes and returns."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch
from distcheck.training.outputs import calls_of, per_sample

# The ids of some of the shard's samples, and what the model returned for each of them.
Saw = Callable[[torch.Tensor, torch.Tensor | None], None]


class LossOfShard:
    """What `backward` is given; see `contract.LossOf`. `saw` hears of the outputs that a loss is
    computed of, where it may be differentiated.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        model: nn.Module,
        saw: Saw | None = None,
    ) -> None:
        self._loss, self._model, self._saw = loss, model, saw

    def __call__(self, batch: Batch) -> torch.Tensor:
        """The loss of what the wrapped model makes of the batch."""
        if self._saw is None or not torch.is_grad_enabled():
            return self._loss(self._model, batch)
        with calls_of(self._model, len(batch.ids)) as calls:
            loss = self._loss(self._model, batch)
        self._saw(batch.ids, calls.rows)
        return loss

    def given(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss of outputs that were computed already."""
        if self._saw is not None and torch.is_grad_enabled():
            self._saw(batch.ids, per_sample(outputs, len(batch.ids)))
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
