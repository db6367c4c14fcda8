"""The loss of a shard as a strategy's `backward` computes it, and how often it is called.

A custom backward that calls the loss on consecutive parts of the shard accumulates gradients, even
if its contract does not declare that. The number of parts is recorded, so that the reference can be
computed over the same parts.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, LossOf, Step
from distcheck.recordings.traces.layout import NO_LOSS
from distcheck.training.outputs import outputs_per_sample, record_outputs

MOST_STRETCHES = 255  # limit of a trace; larger numbers are not recorded
# The ids of some of the shard's samples, and the model's output for each of them.
Saw = Callable[[torch.Tensor, torch.Tensor | None], None]
Backward = Callable[[LossOf, Batch, Step], torch.Tensor | None]


class LossOfShard:
    """The argument of `backward`; see `contract.LossOf`. `saw` receives the outputs from which a
    differentiable loss is computed. The loss is multiplied by each of `factors`.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Batch], torch.Tensor],
        model: nn.Module,
        saw: Saw | None = None,
        factors: tuple[float, ...] = (),
    ) -> None:
        self._loss, self._model, self._saw = loss, model, saw
        self._factors = [factor for factor in factors if factor != 1.0]
        self._calls: list[torch.Tensor] = []  # the samples of every call

    def times(self, *factors: float) -> "LossOfShard":
        """Return a copy whose loss is multiplied by these factors, without recorded calls."""
        return LossOfShard(self._loss, self._model, self._saw, factors)

    def __call__(self, batch: Batch) -> torch.Tensor:
        if self._saw is None or not torch.is_grad_enabled():
            return self._counted(batch, self._loss(self._model, batch))
        with record_outputs(self._model, len(batch.ids)) as calls:
            loss = self._loss(self._model, batch)
        self._saw(batch.ids, calls.rows)
        return self._counted(batch, loss)

    def given(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        if self._saw is not None and torch.is_grad_enabled():
            self._saw(batch.ids, outputs_per_sample(outputs, len(batch.ids)))
        return self._counted(batch, self._loss(_Answers(outputs), batch))

    def _counted(self, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._calls.append(batch.ids)
        for factor in self._factors:
            loss = loss * factor
        return loss

    def stretches(self, piece: Batch) -> int:
        """Return the number of calls if they covered the parts of `Batch.split`; otherwise 1."""
        count = len(self._calls)
        if not 1 < count <= MOST_STRETCHES:
            return 1
        parts = piece.split(count)
        alike = len(parts) == count and all(
            torch.equal(part.ids, ids) for part, ids in zip(parts, self._calls, strict=True)
        )
        return count if alike else 1


class _Answers(nn.Module):
    """Module that returns known outputs."""

    def __init__(self, outputs: torch.Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self._outputs


class OwnBackward:
    """Runs a strategy's backward over a shard.

    The shard is split into `accumulate` micro-batches, and the loss is multiplied by `loss_scale`
    (a power of two, so nothing is rounded). With `may_lack`, a rank need not have the loss.
    """

    def __init__(
        self,
        backward: Backward,
        accumulate: int,
        exchanging: Callable[[bool], AbstractContextManager[None]],
        *,
        loss_scale: float,
        may_lack: bool,
    ) -> None:
        self._backward, self._accumulate, self._exchanging = backward, accumulate, exchanging
        self._loss_scale, self._may_lack = loss_scale, may_lack

    def run(self, loss_of: LossOfShard, batch: Batch, step: Step) -> tuple[float, int]:
        """Return the shard's mean loss (NO_LOSS if the rank does not have it), and the number of
        parts into which each call of backward split its batch: 1 if not split as by `Batch.split`.
        """
        losses, counts = list[torch.Tensor | None](), set[int]()
        pieces = batch.split(self._accumulate)
        assert pieces, "a shard holds at least one sample"
        for piece in pieces:
            with self._exchanging(piece is pieces[-1]):
                loss, count = self._of_piece(
                    loss_of.times(piece.share_of(batch), self._loss_scale), piece, step
                )
            losses.append(loss)
            counts.add(count)
        stretches = counts.pop() if len(counts) == 1 else 1
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses):
            return NO_LOSS, stretches
        total = known[0]
        for loss in known[1:]:
            total = total + loss
        return float(total), stretches

    def _of_piece(
        self, loss_of: LossOfShard, piece: Batch, step: Step
    ) -> tuple[torch.Tensor | None, int]:
        """Call backward on a micro-batch like a script that accumulates gradients: for a step of
        the micro-batch's samples, with a loss weighted by its share. The rank's weight is
        unchanged.
        """
        if len(piece.ids) != step.samples:
            whole = step.total_samples * len(piece.ids) // step.samples
            step = replace(step, samples=len(piece.ids), total_samples=whole, tokens=piece.tokens)
            piece = replace(piece, total=whole)
        returned = self._backward(loss_of, piece, step)
        if returned is None and self._may_lack:
            return None, loss_of.stretches(piece)
        if not isinstance(returned, torch.Tensor):
            or_none = ", or None on a rank that does not have it" if self._may_lack else ""
            raise TypeError(
                "the strategy's backward() must return the shard's mean loss, a tensor"
                f"{or_none}, but returned {returned!r}"
            )
        loss = returned.detach()
        loss = loss / self._loss_scale if self._loss_scale != 1.0 else loss
        return loss, loss_of.stretches(piece)
