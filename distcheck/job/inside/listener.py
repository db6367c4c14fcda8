"""What can be heard of a training script, by the places of `hooks`."""

from typing import Any

import torch


class NullListener:
    """Hears nothing of a training script: what a listener does not care for. A listener may put
    other data into the tensors that it hears of.
    """

    def begins(self, loader: Any) -> None:
        """A pass over a data loader is about to begin."""

    def iterates(self, loader: Any, iterator: Any) -> None:
        """A pass over a data loader begins."""

    def samples_from(self, iterator: Any) -> None:
        """A pass over a data loader has got its sampler's iterator."""

    def fetches(self) -> None:
        """This process begins to read samples of a batch."""

    def fetched(self) -> None:
        """It has read them."""

    def batch(self, iterator: Any, batch: Any) -> None:
        """A data loader hands out a batch."""

    def is_over(self, iterator: Any) -> bool:
        """Whether a data loader is to hand out nothing more."""
        return False

    def length(self, loader: Any) -> int | None:
        """How many batches a data loader is to have; None: its own number."""
        return None

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost model is called, in training."""

    def leaves(self, model: torch.nn.Module, result: Any) -> None:
        """That call is over."""

    def evaluates(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost model is called, and not in training."""

    def reaches(self, place: Any) -> None:
        """A backward pass goes through what a forward pass returned."""

    def gradient(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient is about to be added to a parameter's."""

    def target(self, computed: torch.Tensor, target: Any) -> None:
        """A loss of torch's is called with a target."""

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """It has returned."""

    def backward(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""

    def backward_over(self) -> None:
        """It is over."""

    def gradients_ready(self) -> None:
        """Something is about to use the gradients: clipping, unscaling or a step."""

    def clipped(self, kind: str, most: float, norm: Any, parameters: Any) -> None:
        """Gradients were clipped."""

    def scales(self, scaler: Any) -> None:
        """A GradScaler is about to scale a loss."""

    def unscales(self, optimizer: Any) -> None:
        """A GradScaler divides the gradients of an optimizer by its scale."""

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A GradScaler is asked for a step."""

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """It has made the step, or has skipped it."""

    def autocasts(self, context: Any) -> None:
        """Autocast begins, or ends for a while."""

    def makes(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer gets parameters."""

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; or it has just called its closure."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""

    def collective(self, name: str, place: str, given: Any) -> None:
        """Python code calls a collective."""
