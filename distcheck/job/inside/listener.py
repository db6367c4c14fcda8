"""Listeners to the events of `hooks`: of a step, of the calls of modules, and of operators."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class ModuleListener(Protocol):
    """Receives each call of a module within the outermost model."""

    def begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any: ...

    def ends(self, call: Any, result: Any) -> None: ...


class OpListener(Protocol):
    """Records operators in the parts of a step for which `hears` is entered."""

    is_silent: bool  # while distcheck computes

    def hears(self, part: str) -> AbstractContextManager[None]: ...


class NullListener:
    """Ignores every event. Subclasses override events, and may overwrite tensors in place."""

    def begins(self, loader: Any) -> None:
        """A pass over a data loader is about to start."""

    def iterates(self, loader: Any, iterator: Any) -> None:
        """A pass over a data loader has started."""

    def samples_from(self, iterator: Any) -> None:
        """A pass over a data loader has created its sampler's iterator."""

    def fetches(self) -> None:
        """This process starts to read samples of a batch."""

    def fetched(self) -> None:
        """This process has read the samples."""

    def batch(self, iterator: Any, batch: Any) -> None:
        """A data loader yields a batch."""

    def is_over(self, iterator: Any) -> bool:
        """Return True if a data loader must stop at this position."""
        return False

    def length(self, loader: Any) -> int | None:
        """Return the number of batches that a data loader must report; None for its own number."""
        return None

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost model is called in training mode."""

    def leaves(self, model: torch.nn.Module, result: Any) -> None:
        """The call of the outermost model has returned."""

    def evaluates(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost model is called outside training."""

    def reaches(self, place: Any) -> None:
        """A backward pass reaches the output of a forward pass."""

    def gradient(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient is about to be accumulated into a parameter."""

    def target(self, computed: torch.Tensor, target: Any) -> None:
        """A torch loss is called with a target."""

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """A torch loss has returned."""

    def backward(self, loss: torch.Tensor) -> None:
        """A backward pass starts."""

    def backward_over(self) -> None:
        """A backward pass has ended."""

    def gradients_ready(self) -> None:
        """Gradients are about to be used by clipping, unscaling or a step."""

    def clipped(self, kind: str, most: float, norm: Any, parameters: Any) -> None:
        """Gradients were clipped."""

    def scales(self, scaler: Any) -> None:
        """A GradScaler is about to scale a loss."""

    def unscales(self, optimizer: Any) -> None:
        """A GradScaler divides the gradients of an optimizer by its scale."""

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """GradScaler.step is called."""

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """A GradScaler has made or skipped the step."""

    def autocasts(self, context: Any) -> None:
        """Autocast starts, or is suspended."""

    def makes(self, optimizer: torch.optim.Optimizer) -> None:
        """Parameters are added to an optimizer."""

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step, or has just called its closure."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""

    def collective(self, name: str, place: str, given: Any) -> None:
        """Python code calls a collective."""
