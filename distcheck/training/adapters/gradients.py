"""Handing gradients to the user's function, and taking back what it made of them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from distcheck.errors import UsageError
from distcheck.training.whole_tensors import is_distributed

_DESCENDS = 0.5  # cosine; parameters and their gradients are about at right angles


def present(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [parameter for parameter in parameters if parameter.grad is not None]


def wait_for(answer: Any) -> Any:
    """Waits for what an asynchronous call returned; the answer, where it was none."""
    if isinstance(answer, list | tuple) and answer and all(hasattr(a, "wait") for a in answer):
        for work in answer:
            work.wait()
        return None
    if hasattr(answer, "wait") and not isinstance(answer, torch.Tensor):
        answer.wait()
        return None
    return answer


def take_back(parameters: Sequence[nn.Parameter], answer: Any, *, what: str) -> None:
    """Makes a list of tensors, or a single one, the parameters' gradients.

    Raises UsageError for an answer of another shape.
    """
    tensors = list(answer) if isinstance(answer, list | tuple) else [answer]
    fits = len(tensors) == len(parameters)
    for parameter, tensor in zip(parameters, tensors, strict=False):
        tensor = torch.as_tensor(tensor)
        if not fits or tensor.shape != parameter.shape:
            fits = False
            break
        assert parameter.grad is not None
        if tensor is not parameter.grad:
            parameter.grad = tensor.detach().to(parameter.grad).clone()
    if not fits:
        shown = [
            tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors
        ]
        raise UsageError(
            f"{what} returned {str(shown[:4])[:200]} for {len(parameters)} gradients; expected is "
            "nothing (in place), or a tensor of the same shape for each"
        )


def _is_still(parameter: torch.Tensor, before: torch.Tensor) -> bool:
    if is_distributed(parameter) or parameter.layout != torch.strided:
        return False  # that is, let the sums tell
    return torch.equal(parameter, before)


class Stillness:
    """That a call which is to change gradients does not descend along them as well.

    A call that moves parameters in some other way (a decay, a broadcast) is judged like any other.
    Looked at in the first step only.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(p, p.detach().clone()) for p in model.parameters()]

    def check(self, what: str) -> None:
        """Raises UsageError where parameters have moved against the gradient: by hand-written SGD
        exactly so (a cosine of 1), by Adam's first step (the gradient's signs) still mostly.
        """
        if all(_is_still(parameter, before) for parameter, before in self._before):
            return
        along = moved = slope = 0.0
        for parameter, before in self._before:
            if parameter.grad is None or is_distributed(parameter):
                continue
            gradient = parameter.grad.detach().double()
            step = before.double() - parameter.detach().double()
            along += float((step * gradient).sum())
            moved += float(step.square().sum())
            slope += float(gradient.square().sum())
        if along > _DESCENDS * math.sqrt(moved * slope):
            raise UsageError(
                f"{what} updates the parameters itself, so distcheck cannot see its gradients; if "
                "it calls optimizer.step(), give --as step; if it takes the step of plain SGD, "
                "give --as steps-inside; otherwise split it in two, and give the part that "
                "synchronises"
            )
