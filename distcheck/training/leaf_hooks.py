"""A gradient as backward computed it, before any hook of the code changes it.

`LeafHook` sits on the node of the graph that adds a gradient to `.grad`, which torch calls after
the hooks of the leaf tensor. So those are seen when they are registered: `Tensor.register_hook`
hands torch a function that first notes the gradient, and then calls the code's own. Nothing else
about the code's hooks changes: torch calls them, and forgets them (`dist.broadcast(parameter,
src=0)` makes it), as it would without distcheck. `torch.autograd.grad` calls no hook of a leaf:
what it returns for one is kept, and is `asked` for where a step had no other backward.
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
_before: dict[int, torch.Tensor] = {}  # what the first hook of such a leaf was given
_returned: dict[int, torch.Tensor] = {}  # what torch.autograd.grad() returned for such a leaf


class LeafHook:
    """One hook on one leaf that requires a gradient: it gets what backward computed."""

    def __init__(self, leaf: torch.Tensor, hook: Hook) -> None:
        watch_registrations()
        self._leaf, self._hook = leaf, hook
        self._node: Any = None
        _watched[id(leaf)] = self
        self.put_back()

    @property
    def is_read(self) -> bool:
        """Whether a backward that begins now cannot give the leaf a gradient past the hook: it can
        where the leaf has got other data (a dtype, a device) since the hook was put there.
        """
        return not self._leaf.requires_grad or get_gradient_edge(self._leaf).node is self._node

    def put_back(self) -> None:
        """Makes torch call the hook again, if it would not. A backward begins after this."""
        _before.pop(id(self._leaf), None)
        _returned.pop(id(self._leaf), None)
        if self._leaf.requires_grad and not self.is_read:
            self._node = get_gradient_edge(self._leaf).node
            self._node.register_prehook(self._called)

    def asked(self) -> None:
        """Calls the hook with what torch.autograd.grad() returned since the hook was put back."""
        gradient = _returned.pop(id(self._leaf), None)
        if gradient is not None:
            self._hook(gradient)

    def _called(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = _before.pop(id(self._leaf), gradients[0])
        if gradient is not None:
            self._hook(gradient)


@functools.cache
def watch_registrations() -> None:
    """Notes, from now on, what the first of the code's hooks on a leaf is given."""
    original: Any = torch.Tensor.register_hook

    @functools.wraps(original)
    def register_hook(tensor: torch.Tensor, hook: Hook) -> Any:
        noting = _noting(tensor, hook) if tensor.is_leaf else hook
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


def _noting(leaf: torch.Tensor, hook: Hook) -> Hook:
    key = id(leaf)

    def called(gradient: torch.Tensor) -> Any:
        if key in _watched and key not in _before:
            _before[key] = gradient.clone()  # the hook may work in place
        return hook(gradient)

    return functools.update_wrapper(called, hook)
