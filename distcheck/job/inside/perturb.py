"""A job whose parameters are moved by one ULP in each step: how far two right runs may part.

Before the first forward pass of a step every parameter moves by one ULP, up or down by chance, and
before the optimizer steps it is put back: what a step makes of the parameters is the consequence of
other gradients alone. The ULP is that of the dtype that forward passes compute in: under autocast,
of that.
"""

from typing import Any

import torch

from distcheck.job.inside import state
from distcheck.job.inside.recorder import Recorder
from distcheck.machine import seeds


class PerturbingRecorder(Recorder):
    """Records as ever, and moves the parameters."""

    _unmoved: dict[str, torch.Tensor] | None = None
    _dtype: torch.dtype | None = None  # that forward passes compute in, where that is autocast's

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Moves the parameters at the first forward pass of a step, and those of models that were
        not called before.
        """
        super().enters(model, args, kwargs)
        if self._active:
            self._dtype = self._computed()
            self._unmoved = {} if self._unmoved is None else self._unmoved
            self._move()

    def autocasts(self, context: Any) -> None:
        """Moves them by an ULP of what autocast computes in, if that begins within the model."""
        super().autocasts(context)
        if self._unmoved is not None and self._dtype != self._computed():
            self._put_back()
            self._unmoved, self._dtype = {}, self._computed()
            self._move()

    def _computed(self) -> torch.dtype | None:
        name = self._held.about.get("computed")
        return None if name is None else getattr(torch, name)  # type: ignore[no-any-return]

    def _move(self) -> None:
        assert self._unmoved is not None
        with torch.no_grad():
            for name, parameter in self.parameters.by_name.items():
                if name in self._unmoved or not parameter.is_floating_point():
                    continue
                own = state.local(parameter).detach()
                rank = self._rank if own is not parameter and own.shape != parameter.shape else 0
                seed = seeds.derive(self._settings.draw, name, self.steps_over, rank)
                moves = torch.Generator().manual_seed(seed % (1 << 63))
                self._unmoved[name] = own.clone()
                own.data.copy_(state.perturbed(own.cpu(), moves, self._dtype))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._put_back()
        super().steps(optimizer)

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A step that is skipped moves nothing."""
        self._put_back()
        super().scaler_stepped(scaler, optimizer)

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, own in (self._unmoved or {}).items():
                state.local(self.parameters.by_name[name]).detach().data.copy_(own)
        self._unmoved = None
