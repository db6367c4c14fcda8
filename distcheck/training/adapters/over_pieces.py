"""The optimizer of a rank's pieces, beside the whole model that is recorded."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from distcheck.training.adapters.pieces import Pieces
from distcheck.training.optimizers import StandIn


class OverPieces(StandIn):
    """The workload's optimizer over a rank's pieces; after a step the whole model is as it is."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pieces: Pieces,
        whole: nn.Module,
        worked_on: nn.Module,
    ) -> None:
        super().__init__(inner)
        self._pieces, self._whole, self._worked_on = pieces, whole, worked_on
        self._collect()

    @property
    def state(self) -> Any:
        """Of the whole parameters."""
        return self._state

    def step(self) -> None:
        """Steps the pieces, then puts parameters and state together."""
        self._inner.step()
        self._collect()

    def _collect(self) -> None:
        self._pieces.write_parameters()
        self._state = self._pieces.state_of(self._inner)
        trained = dict(self._worked_on.named_buffers())
        with torch.no_grad():
            for name, buffer in self._whole.named_buffers():
                if name in trained and not trained[name].is_meta:
                    buffer.copy_(trained[name])


class Followed:
    """What a workload does to its model before a step, done to the model that is trained as well:
    modes, and attributes that are plain values. What the strategy itself set there stays.
    """

    def __init__(self, whole: nn.Module, worked_on: nn.Module) -> None:
        self._whole, self._worked_on = whole, worked_on
        self._seen = dict(_plain_values(whole))

    def follow(self) -> None:
        """Takes over what has changed since the last call."""
        theirs = dict(self._worked_on.named_modules())
        for (name, key), value in _plain_values(self._whole):
            if self._seen.get((name, key), _MISSING) != value and name in theirs:
                setattr(theirs[name], key, value)
            self._seen[name, key] = value


_MISSING = object()


def _plain_values(model: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, bool | int | float | str):
                yield (name, key), value
