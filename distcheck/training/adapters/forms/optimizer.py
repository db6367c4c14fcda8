"""A class (or function) around the optimizer, whose step() synchronizes gradients."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Build
from distcheck.errors import UsageError
from distcheck.machine.compat import has_step_hooks
from distcheck.training.adapters import names
from distcheck.training.adapters.called import call_of_method
from distcheck.training.adapters.forms.own_optimizer import WatchedOptimizer
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import OptimizerProxy


def fits(target: Target) -> bool:
    """Return True for a class that takes an optimizer or is one, and for a function that wraps one,
    such as `DistributedOptimizer(optimizer, ...)` in many libraries.
    """
    first = target.required[:1]
    if target.is_function and any(_changes_step(target, p.name) for p in target.parameters):
        return True
    if target.is_class and issubclass(target.value, torch.optim.Optimizer):
        first = target.required  # also of parameters, before the optimizer
    if not any(map(_takes_optimizer, first)):
        return False
    is_named_so = "optim" in target.name.lower() or target.name[:1].isupper()
    return target.is_class or (is_named_so and target.source.returns_what_it_calls)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that wraps the workload's optimizer. Gradients are final when the inner
    optimizer, or the torch class that it is derived from, begins its step. Raises UsageError.
    """
    supplied = optimizer_name(target)
    if not supplied:
        raise refusal_error(
            target, f"strategy {target.spec!r} takes no optimizer: {target.signature}"
        )
    filling = Filling(scene, target.value, what=target.described, supplied=supplied)

    objects: list[Any] = []

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        inner = build(parameters)
        base = type(inner)
        made = filling.call(inner)
        objects[:] = [made]
        made = made if callable(getattr(made, "step", None)) else inner
        if isinstance(made, base) and type(made) is not base:  # its step() ends in torch's own
            return WatchedOptimizer(made, base, scene, updates=True)
        # It may have replaced the inner optimizer's step, or added hooks to it.
        is_as_it_was = made is inner and "step" not in vars(inner) and not has_step_hooks(inner)
        if is_as_it_was:
            raise UsageError(
                f"{target.spec!r} created no optimizer with a step(), and did not change the step"
            )
        return WrappedOptimizer(made, inner, scene)

    finish, reset = target.adaptation.finish, target.adaptation.reset
    finish = "" if finish == names.NO_FINISH else finish
    how = f"finish {finish}()" if finish else "whose step() synchronizes"
    how += f", reset {reset}() before every step" if reset else ""
    called = {"sync": finish, "begun": reset}
    phases: Any = {
        moment: call_of_method(scene, objects, name, target.described)
        for moment, name in called.items()
        if name
    }
    note = f"{target.name} around the optimizer, {how}"
    return target.loaded(note, optimizer=optimizer, update="optimizer", **phases)


def _changes_step(target: Target, name: str) -> bool:
    """Return True if a parameter is an optimizer whose step is replaced or gets pre-hooks."""
    assigned = target.source.attributes_of(name, assigned=True)
    hooked = "register_step_pre_hook" in target.source.attributes_of(name)
    return hooked or ("step" in assigned and meaning_of(name) in ("optimizer", ""))


def optimizer_name(target: Target) -> list[str]:
    """Return the parameter that takes the optimizer, by its name or annotation, or else the first
    required parameter of unknown meaning. Empty if there is none.
    """
    taken = named_parameters(target.value)
    changed = [p for p in taken if _changes_step(target, p.name)]
    unknown = [p for p in target.required[:1] if not meaning_of(p.name)]
    return [p.name for p in [*filter(_takes_optimizer, taken), *changed, *unknown]][:1]


def _takes_optimizer(parameter: inspect.Parameter) -> bool:
    last = parameter.name.rpartition("_")[2]  # of local_opt
    return last in names.OPTIMIZERS or "Optimizer" in str(parameter.annotation)


class _OfBoth(dict[str, Any]):
    """A parameter group whose settings are also written to another group."""

    def __init__(self, inner: dict[str, Any], made: dict[str, Any]) -> None:
        super().__init__(inner)
        self._groups = (inner, made)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        for group in self._groups:
            group[key] = value


class WrappedOptimizer(OptimizerProxy):
    """A user's optimizer around torch's optimizer `optim`; the loop uses both."""

    def __init__(
        self, made: Any, inner: torch.optim.Optimizer, scene: Scene, *, has_groups: bool = True
    ) -> None:
        super().__init__(inner)
        self._made, self.optim, self._scene = made, inner, scene
        self._has_groups = has_groups  # True if a scheduler changes the wrapper's groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for a scheduler: those of the wrapper. If these are missing or have none
        of the settings, return torch's groups, and also write their settings to the wrapper's
        groups, which may copy them in a step.
        """
        inner: list[dict[str, Any]] = self.optim.param_groups
        made: list[dict[str, Any]] = getattr(self._made, "param_groups", inner)
        has_groups = self._has_groups and all(len(group) > 1 for group in made)
        if has_groups or made is inner or len(made) != len(inner):
            return made if has_groups else inner
        return [_OfBoth(*pair) for pair in zip(inner, made, strict=True)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        method: Callable[..., Any] | None = getattr(self._made, "zero_grad", None)
        if method is None:
            super().zero_grad(set_to_none=set_to_none)
        else:
            method()

    def step(self) -> None:
        """Call the wrapper's step, with the arguments that it requests by name."""
        Filling(self._scene, self._made.step, what="its step()").call()
