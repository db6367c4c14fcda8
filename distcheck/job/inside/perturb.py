"""Records a job whose parameters are perturbed by one ULP in each step, to measure the noise floor
of the job.

Every element changes by ±1 ULP at random before the first forward pass of a step, and is restored
before `optimizer.step()`. Parameters therefore change only because gradients differ. The ULP is
that of the dtype in which the forward pass computes; under autocast, of autocast's dtype.
"""

from typing import Any

import torch

from distcheck.job.inside import tensors
from distcheck.job.inside.recorder import Recorder
from distcheck.machine import numerics, seeds


class PerturbingRecorder(Recorder):
    """Recorder of a script with perturbed parameters."""

    _unmoved: dict[str, torch.Tensor] | None = None
    _dtype: torch.dtype | None = None  # forward's dtype, if autocast sets it

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Perturb the parameters before the first forward pass of a step, and those of
        new models.
        """
        super().enters(model, args, kwargs)
        if self._active:
            self._dtype = self._compute_dtype()
            self._unmoved = {} if self._unmoved is None else self._unmoved
            self._perturb()

    def autocasts(self, context: Any) -> None:
        """Perturb again by one ULP of autocast's dtype, if autocast starts within the model."""
        super().autocasts(context)
        if self._unmoved is not None and self._dtype != self._compute_dtype():
            self._put_back()
            self._unmoved, self._dtype = {}, self._compute_dtype()
            self._perturb()

    def _compute_dtype(self) -> torch.dtype | None:
        name = self._held.about.get("computed")
        return None if name is None else getattr(torch, name)  # type: ignore[no-any-return]

    def _perturb(self) -> None:
        assert self._unmoved is not None
        with torch.no_grad():
            for name, parameter in self.parameters.by_name.items():
                if name in self._unmoved or not parameter.is_floating_point():
                    continue
                own = tensors.local(parameter).detach()
                rank = self._rank if own is not parameter and own.shape != parameter.shape else 0
                seed = seeds.derive(self._settings.draw, name, self.steps_over, rank)
                moves = torch.Generator().manual_seed(seed % (1 << 63))
                self._unmoved[name] = own.clone()
                own.data.copy_(numerics.perturbed(own.cpu(), moves, self._dtype))

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._put_back()
        super().steps(optimizer)

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """Restore the parameters after a skipped step."""
        self._put_back()
        super().scaler_stepped(scaler, optimizer)

    def _put_back(self) -> None:
        with torch.no_grad():
            for name, own in (self._unmoved or {}).items():
                tensors.local(self.parameters.by_name[name]).detach().data.copy_(own)
        self._unmoved = None
