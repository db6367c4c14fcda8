"""Calls the user's function after backward: checks forbidden effects, handles its result."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from distcheck.errors import UsageError
from distcheck.machine.compat import hooks_of
from distcheck.training.adapters.scene import Scene
from distcheck.training.whole_tensors import is_distributed

Pairs = list[tuple[nn.Parameter, torch.Tensor]]
_DESCENDS = 0.5  # cosine; parameters and their gradients are nearly orthogonal


def with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.grad is not None]


def wait_for_handles(answer: Any) -> Any:
    """Wait for the handles that an asynchronous call returned; return any other answer."""
    if isinstance(answer, list | tuple) and answer and all(hasattr(a, "wait") for a in answer):
        for work in answer:
            work.wait()
        return None
    if hasattr(answer, "wait") and not isinstance(answer, torch.Tensor):
        answer.wait()
        return None
    return answer


def set_gradients_from(parameters: Sequence[nn.Parameter], answer: Any, *, what: str) -> None:
    """Set the parameters' gradients from returned tensors. Raises UsageError for wrong shapes."""
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
            f"{what} returned {str(shown[:4])[:200]} for {len(parameters)} gradients; expected "
            "None (in place), or a tensor of the same shape for each"
        )


class NoStepCheck:
    """Checks that a call meant to change gradients does not also take an SGD step with them.

    A call that changes parameters differently (weight decay, a broadcast) is judged like any call.
    Only the first step is checked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [(p, p.detach().clone()) for p in model.parameters()]

    def check(self, what: str) -> None:
        """Raise UsageError if parameters moved against the gradient. The cosine is 1 for
        hand-written SGD, and still large for Adam's first step (the signs of the gradient).
        """
        if all(_is_plain(p) and torch.equal(p, before) for p, before in self._before):
            return  # for others, the sums decide
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
                f"{what} updates the parameters itself, so distcheck cannot see its gradients; "
                "if it calls optimizer.step(), pass --as step; if it performs a plain SGD step, "
                "pass --as steps-inside; otherwise split it in two and pass the part that "
                "synchronizes"
            )


class AfterBackward:
    """Calls one function after every backward. The first call shows if the function takes a step,
    registers hooks, or returns gradients instead of changing them.
    """

    def __init__(self, scene: Scene, what: str) -> None:
        self._scene, self._what = scene, what
        self._is_first, self._returns = True, False

    def run(self, call: Callable[[], Any]) -> Any:
        """Make the call, wait for asynchronous operations, and return its result.

        If the first call returned gradients, one for each parameter in a list, tuple or dict, and
        did not change the parameters' gradients, the returned ones become the gradients. Raises
        UsageError if the first call takes a step or registers hooks.
        """
        if not self._is_first:
            answer = wait_for_handles(call())
            if self._returns:
                self._take(_gradients_of(self._scene.current_model, answer))
            return answer
        self._is_first = False
        model = self._scene.current_model
        still, hooks = NoStepCheck(model), _hook_ids(model)
        gradients = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        before = [(p, gradient.clone()) for p, gradient in gradients if _is_plain(gradient)]
        answer = wait_for_handles(call())
        if isinstance(answer, nn.Module) and answer is not model:
            return answer
        if _hook_ids(model) - hooks:
            raise UsageError(
                f"{self._what} registers hooks, but was called after backward, which is too late "
                "for the first step and repeated at every step; if it must be called once before "
                "training, pass --as hooks"
            )
        still.check(self._what)
        pairs = _gradients_of(model, answer)
        in_place = any(not _same(p.grad, kept) for p, kept in before)
        if not in_place and any(not _same(tensor, p.grad) for p, tensor in pairs):
            self._returns = True  # if it also changes gradients in place, they are something else
            self._take(pairs)
        return answer

    def _take(self, pairs: Pairs) -> None:
        for parameter, tensor in pairs:
            set_gradients_from([parameter], tensor, what=self._what)


def _hook_ids(model: nn.Module) -> set[tuple[int, str, int]]:
    owners: list[nn.Module | torch.Tensor] = [*model.parameters(), *model.modules()]
    return {(id(owner), *hook) for owner in owners for hook in hooks_of(owner)}


def _gradients_of(model: nn.Module, answer: Any) -> Pairs:
    """Return the new gradients in an answer, matched by order or by name; empty if it holds other
    tensors, such as the parameters themselves.
    """
    named = dict(model.named_parameters())
    if isinstance(answer, dict):
        known = all(name in named for name in answer)
        answer = [answer.get(name) for name in named] if known else list(answer.values())
    if not isinstance(answer, list | tuple):
        return []
    required = with_gradient(named.values())
    returned = [tensor for tensor in answer if tensor is not None]
    pairs = list(zip(required, returned, strict=False))
    is_each = len(required) == len(returned) and bool(required)
    return pairs if is_each and all(_could_be(p, t) for p, t in pairs) else []


def _could_be(parameter: nn.Parameter, tensor: Any) -> bool:
    """Return True if a tensor can be the parameter's gradient: its shape, not the parameter."""
    if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor):
        return False
    is_value = tensor.data_ptr() == parameter.data_ptr() and tensor.numel() > 0
    return tensor.shape == parameter.shape and not is_value


def _is_plain(tensor: torch.Tensor | None) -> bool:
    """Return True if a tensor can be compared elementwise on this rank."""
    return tensor is not None and tensor.layout == torch.strided and not is_distributed(tensor)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or not _is_plain(one) or not _is_plain(other):
        return False
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
