"""A strategy that runs backward itself: what the loop hands it, and what is seen of it.

Its loss function is watched. A backward that calls it on one stretch of the shard after the other
accumulates, whether or not its contract says so: the number of stretches is recorded, so that what
is expected can be computed over the same ones.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from distcheck.contract import Batch, LossOf, Step
from distcheck.recordings.traces.layout import NO_LOSS
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.losses import check_returned

MOST_STRETCHES = 255  # that a trace can hold; of more, none is noted
Exchanging = Callable[[bool], AbstractContextManager[None]]


class OwnBackward:
    """Runs a strategy's own backward over a shard, in one piece or in `accumulate` of them, its
    loss multiplied by `loss_scale` (a power of two, which rounds nothing).
    """

    def __init__(
        self,
        strategy: LoadedStrategy,
        accumulate: int,
        exchanging: Exchanging,
        *,
        may_lack: bool = False,
    ) -> None:
        self._strategy, self._accumulate = strategy, accumulate
        self._exchanging, self._may_lack = exchanging, may_lack

    def run(
        self, loss_of: LossOf, batch: Batch, step: Step, loss_scale: float
    ) -> tuple[float, int]:
        """The shard's mean loss (NO_LOSS where a rank may lack it, and does), and how many
        stretches each call of backward cut its batch into (1 where it was not cut, or not as
        `Batch.split` does).
        """
        total: torch.Tensor | None = None
        counts, lacking = set[int](), False
        pieces = batch.split(self._accumulate)
        for piece in pieces:
            with self._exchanging(piece is pieces[-1]):
                found, count = self._one(
                    loss_of, piece, step, loss_scale, share=piece.share_of(batch)
                )
            counts.add(count)
            lacking = lacking or found is None
            if found is not None:
                total = found if total is None else total + found
        assert total is not None or lacking, "a shard holds at least one sample"
        stretches = counts.pop() if len(counts) == 1 else 1
        return NO_LOSS if lacking or total is None else float(total), stretches

    def _one(
        self, loss_of: LossOf, piece: Batch, step: Step, loss_scale: float, *, share: float
    ) -> tuple[torch.Tensor | None, int]:
        """As a script that accumulates calls it: for a step of the piece's samples, of a loss that
        counts by the piece's share. The weight of a rank stays what it is.
        """
        backward = self._strategy.backward
        assert backward is not None
        if len(piece.ids) != step.samples:
            whole = step.total_samples * len(piece.ids) // step.samples
            step = replace(step, samples=len(piece.ids), total_samples=whole, tokens=piece.tokens)
            piece = replace(piece, total=whole)
        watched = _Watched(loss_of, share, loss_scale)
        returned = backward(watched, piece, step)
        check_returned(returned, may_lack=self._may_lack)
        if returned is None:
            return None, watched.stretches(piece)
        found = returned.detach()
        return found / loss_scale if loss_scale != 1.0 else found, watched.stretches(piece)


class _Watched:
    """A loss function that notes the samples of every call that may be differentiated."""

    def __init__(self, loss_of: LossOf, share: float, loss_scale: float) -> None:
        self._loss_of, self._share, self._loss_scale = loss_of, share, loss_scale
        self._calls: list[torch.Tensor] = []

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self._seen(batch, self._loss_of(batch))

    def given(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss of outputs that were computed already."""
        return self._seen(batch, self._loss_of.given(outputs, batch))

    def _seen(self, batch: Batch, loss: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._calls.append(batch.ids)
        if self._share != 1.0:
            loss = loss * self._share
        return loss * self._loss_scale if self._loss_scale != 1.0 else loss

    def stretches(self, piece: Batch) -> int:
        """How many there were, if they are those of `Batch.split`; else 1."""
        count = len(self._calls)
        if not 1 < count <= MOST_STRETCHES:
            return 1
        parts = piece.split(count)
        alike = len(parts) == count and all(
            torch.equal(part.ids, ids) for part, ids in zip(parts, self._calls, strict=True)
        )
        return count if alike else 1
