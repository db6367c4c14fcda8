"""Observes a gradient as backward computed it, before any hook of the code changes it.

`LeafHook` sits on the graph node that accumulates into `.grad`, which torch calls after the hooks
of the leaf tensor. Hooks of the code are therefore intercepted at registration:
`Tensor.register_hook` passes torch a function that first records the gradient, and then calls the
code's hook. Nothing else changes: torch calls the hooks, and drops them (for example on
`dist.broadcast(parameter, src=0)`), as without distcheck. `torch.autograd.grad` calls no leaf hook:
its result for a leaf is kept, and `asked` reads it if a step had no other backward.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

Hook = Callable[[torch.Tensor], Any]
_watched: "weakref.WeakValueDictionary[int, LeafHook]" = (
    weakref.WeakValueDictionary()
)  # by id(leaf)
_before: dict[int, torch.Tensor] = {}  # argument of the first hook of such a leaf
_returned: dict[int, torch.Tensor] = {}  # result of torch.autograd.grad() for such a leaf


class LeafHook:
    """One hook on a leaf that requires a gradient; it is called with that gradient."""

    def __init__(self, leaf: torch.Tensor, hook: Hook) -> None:
        watch_registrations()
        self._leaf, self._hook = leaf, hook
        self._node: Any = None
        _watched[id(leaf)] = self
        self.put_back()

    @property
    def is_read(self) -> bool:
        """Return True if a backward that begins now will call the hook. It bypasses the hook if the
        leaf's data was replaced (by a different dtype or device) since the hook was registered.
        """
        return not self._leaf.requires_grad or get_gradient_edge(self._leaf).node is self._node

    def put_back(self) -> None:
        """Register the hook again if torch would not call it. Call this before a backward."""
        _before.pop(id(self._leaf), None)
        _returned.pop(id(self._leaf), None)
        if self._leaf.requires_grad and not self.is_read:
            self._node = get_gradient_edge(self._leaf).node
            self._node.register_prehook(self._called)

    def asked(self) -> None:
        """Call the hook with the latest result of torch.autograd.grad(), if any."""
        gradient = _returned.pop(id(self._leaf), None)
        if gradient is not None:
            self._hook(gradient)

    def _called(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = _before.pop(id(self._leaf), gradients[0])
        if gradient is not None:
            self._hook(gradient)


@functools.cache
def watch_registrations() -> None:
    """From now on, record the argument of the first of the code's hooks on each leaf."""
    original: Any = torch.Tensor.register_hook

    @functools.wraps(original)
    def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
        noting = _record_first(tensor, hook) if tensor.is_leaf else hook
        return original(tensor, noting)  # type: ignore[no-untyped-call]

    torch.Tensor.register_hook = register_hook  # type: ignore[method-assign]
    grad: Any = torch.autograd.grad

    @functools.wraps(grad)
    def noted(outputs: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        answer = grad(outputs, inputs, *more, **named)
        leaves = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        for leaf, gradient in zip(leaves, answer, strict=False):
            if isinstance(gradient, torch.Tensor) and id(leaf) in _watched:
                kept, own = _returned.get(id(leaf)), gradient.detach()
                _returned[id(leaf)] = own.clone() if kept is None else kept + own
        return answer

    torch.autograd.grad = noted


def _record_first(leaf: torch.Tensor, hook: Hook) -> Hook:
    key = id(leaf)

    def called(gradient: torch.Tensor) -> Any:
        if key in _watched and key not in _before:
            _before[key] = gradient.clone()  # the hook may work in place
        return hook(gradient)

    return functools.update_wrapper(called, hook)
