"""A hook on a leaf tensor that lasts, and that leaves the code's own hooks as they would be.

torch forgets a leaf's Python hooks when the tensor itself, not its `.data`, first goes through a
collective (`dist.broadcast(parameter, src=0)`): the C++ side replaces its list of hooks, and the
dictionary of Python hooks stays behind, which no backward reads any more. It reads it again only
when `_backward_hooks` is assigned. That has two sides:

- Our own hook is lost, and must be put back.
- A hook of the code that is registered afterwards would work if ours were not there, because torch
  assigns the dictionary with its first hook. With ours in it, it would never be called. A hook of
  the code that was registered before the collective is lost in training without distcheck as well,
  and must stay lost here.

So the dictionary is one that notes registrations. Whether torch still reads it shows in its
reference count: the C++ list holds one reference.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

Hook = Callable[[torch.Tensor], Any]
_OURS = -1  # torch counts its own from 0


class LeafHook:
    """One hook on one leaf that requires a gradient, called before any other hook of it."""

    def __init__(self, leaf: torch.Tensor, hook: Hook) -> None:
        self._leaf, self._hook = leaf, hook
        self._install(_Noting(self))
        self._alive = _references(leaf)
        self._in_registration = 0
        leaf.register_hook(_nothing).remove()  # measures the count that a registration sees
        self._calibrated = True

    _calibrated = False
    _dead = False  # hooks of the code were forgotten, and so are those that are registered later

    @property
    def is_read(self) -> bool:
        """Whether torch would call the hook in a backward that begins now."""
        # No variable may hold the dictionary here: it would be one more reference.
        is_ours = isinstance(self._leaf._backward_hooks, _Noting)
        return is_ours and _references(self._leaf) >= self._alive

    def put_back(self) -> None:
        """Makes torch call the hook again, and the code's own only where torch still called those
        without distcheck.
        """
        if self.is_read:
            return
        own = self._leaf._backward_hooks
        kept = _Noting(self)
        if isinstance(own, _Noting):
            self._dead = self._dead or len(own) > 1
        elif own is not None:  # the code has assigned a dictionary of its own
            OrderedDict.update(kept, own)
        self._install(kept)

    def _install(self, hooks: "_Noting") -> None:
        OrderedDict.__setitem__(hooks, _OURS, self._hook)
        hooks.move_to_end(_OURS, last=False)
        self._leaf._backward_hooks = hooks  # type: ignore[assignment]

    def registers(self, hooks: "_Noting", key: int, hook: Hook, count: int) -> None:
        """Notes a hook of the code; `count` are the references that the registration sees."""
        if not self._calibrated:
            self._in_registration = count
        elif self._dead:
            return
        elif count < self._in_registration:  # forgotten since ours was registered
            if len(hooks) > 1:
                self._dead = True
                return
            self._leaf._backward_hooks = hooks  # type: ignore[assignment]
        OrderedDict.__setitem__(hooks, key, hook)


class _Noting(OrderedDict[int, Hook]):
    """A leaf's hooks; says when one is registered."""

    def __init__(self, owner: LeafHook) -> None:
        super().__init__()
        self._owner = owner

    def __setitem__(self, key: int, hook: Hook) -> None:
        self._owner.registers(self, key, hook, sys.getrefcount(self))


def _references(leaf: torch.Tensor) -> int:
    return sys.getrefcount(leaf._backward_hooks)


def _nothing(gradient: torch.Tensor) -> None:
    return None
