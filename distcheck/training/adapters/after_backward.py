"""A call of the user's function after backward: what it must not do, and what it may return."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distcheck.errors import UsageError
from distcheck.training.adapters.gradients import Stillness, take_back, wait_for
from distcheck.training.adapters.gradients import present as with_gradients
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.whole_tensors import is_distributed

Pairs = list[tuple[nn.Parameter, torch.Tensor]]
_HOOKS = (
    "_backward_hooks", "_post_accumulate_grad_hooks", "_backward_pre_hooks",
    "_forward_hooks", "_forward_pre_hooks",
)  # fmt: skip


class AfterBackward:
    """Calls of one function. The first is watched: it shows whether the function takes a step,
    registers hooks, or returns gradients instead of changing them.
    """

    def __init__(self, scene: Scene, what: str) -> None:
        self._scene, self._what = scene, what
        self._is_first, self._returns = True, False

    def run(self, call: Callable[[], Any]) -> Any:
        """Calls it, waits for what it began, and returns its answer. Gradients that it returns, one
        for each parameter in a list, tuple or dict, become the parameters' if its first call left
        those as they were.

        Raises UsageError for what the first call must not do.
        """
        if not self._is_first:
            answer = wait_for(call())
            if self._returns:
                self._take(_gradients_of(self._scene.live_model, answer))
            return answer
        self._is_first = False
        model = self._scene.live_model
        still, hooks = Stillness(model), _hooks(model)
        present = [(p, p.grad) for p in model.parameters() if p.grad is not None]
        before = [(p, gradient.clone()) for p, gradient in present if _is_plain(gradient)]
        answer = wait_for(call())
        if isinstance(answer, nn.Module) and answer is not model:
            return answer
        if _hooks(model) - hooks:
            raise UsageError(
                f"{self._what} registers hooks, but was called after backward: too late for that "
                "step, and again at every other; if it must be called once, before training, "
                "give --as hooks"
            )
        still.check(self._what)
        pairs = _gradients_of(model, answer)
        in_place = any(not _same(p.grad, kept) for p, kept in before)
        if not in_place and any(not _same(tensor, p.grad) for p, tensor in pairs):
            self._returns = True  # beside gradients in place, it is something else
            self._take(pairs)
        return answer

    def _take(self, pairs: Pairs) -> None:
        for parameter, tensor in pairs:
            take_back([parameter], tensor, what=self._what)


def returned(target: Target) -> str:
    """What a report says of gradients that it may return; empty where its source returns none."""
    if not target.source.returns_many:
        return ""
    return ", a tensor for each parameter that it returns is taken for its gradient"


def _hooks(model: nn.Module) -> set[tuple[int, str, int]]:
    """The hooks on a model's parameters and modules."""
    owners = [*model.parameters(), *model.modules()]
    return {
        (id(owner), kind, key)
        for owner in owners
        for kind in _HOOKS
        for key in getattr(owner, kind, None) or ()
    }


def _gradients_of(model: nn.Module, answer: Any) -> Pairs:
    """The new gradients in an answer, in the order of the parameters or by their names; empty where
    it holds something else, such as the parameters themselves.
    """
    named = dict(model.named_parameters())
    if isinstance(answer, dict):
        known = all(name in named for name in answer)
        answer = [answer.get(name) for name in named] if known else list(answer.values())
    if not isinstance(answer, list | tuple):
        return []
    required = with_gradients(list(named.values()))
    found = [t for t in answer if t is not None]
    pairs = list(zip(required, found, strict=False))
    is_each = len(required) == len(found) and bool(required)
    return pairs if is_each and all(_could_be(p, t) for p, t in pairs) else []


def _could_be(parameter: nn.Parameter, found: Any) -> bool:
    """Whether it can be the parameter's gradient: of its shape, and not its own value."""
    if not isinstance(found, torch.Tensor) or not _is_plain(found):
        return False
    is_value = found.data_ptr() == parameter.data_ptr() and found.numel() > 0
    return found.shape == parameter.shape and not is_value


def _is_plain(tensor: torch.Tensor | None) -> bool:
    """Whether it can be compared element by element, on this rank alone."""
    return tensor is not None and tensor.layout == torch.strided and not is_distributed(tensor)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or not _is_plain(one) or not _is_plain(other):
        return False
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
