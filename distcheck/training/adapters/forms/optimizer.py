"""A class (or function) around the optimizer, which synchronises inside its step()."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Build
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.forms.own_optimizer import Watched
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import StandIn


def fits(target: Target) -> bool:
    """A class that is or takes an optimizer, or a function that makes one of an optimizer, as
    `DistributedOptimizer(optimizer, ...)` is in many libraries.
    """
    first = next(iter(target.required), None)
    if first is None or not _takes_optimizer(first):
        return False
    is_named_so = "optim" in target.name.lower() or target.name[:1].isupper()
    return target.is_class or (is_named_so and target.source.returns_what_it_calls)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Made from the workload's optimizer. Its step is begun where the gradients are final: where
    the optimizer inside, or torch's class that it is derived from, begins its own.
    """
    supplied = [p.name for p in named_parameters(target.value) if _takes_optimizer(p)][:1]
    if not supplied:
        raise refusal(target, f"strategy {target.spec!r} takes no optimizer: {target.signature}")
    filling = Filling(scene, target.value, what=target.described, supplied=supplied)

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        inner = build(parameters)
        base = type(inner)
        made = filling.call(inner)
        if isinstance(made, base) and type(made) is not base:  # its step() ends in torch's own
            return Watched(made, base, scene, updates=True)
        if made is inner or not callable(getattr(made, "step", None)):
            raise UsageError(
                f"{target.spec!r} made a {type(made).__name__} that does not define step()"
            )
        return Around(made, inner, scene)

    note = f"{target.name} around the optimizer, whose step() synchronises"
    return target.loaded(note, optimizer=optimizer, update="optimizer")


def _takes_optimizer(parameter: inspect.Parameter) -> bool:
    return parameter.name in names.OPTIMIZERS or "Optimizer" in str(parameter.annotation)


class Around(StandIn):
    """A user's optimizer around torch's own, `optim`; the loop sees both."""

    def __init__(self, made: Any, inner: torch.optim.Optimizer, scene: Scene) -> None:
        super().__init__(inner)
        self._made, self.optim, self._scene = made, inner, scene

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapper's where it has one."""
        method: Callable[..., Any] | None = getattr(self._made, "zero_grad", None)
        if method is None:
            super().zero_grad(set_to_none=set_to_none)
        else:
            method()

    def step(self) -> None:
        """The wrapper's, with what it asks for by name."""
        Filling(self._scene, self._made.step, what="its step()").call()
