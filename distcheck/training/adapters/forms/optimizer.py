"""A class (or function) around the optimizer, which synchronizes inside its step()."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Build
from distcheck.errors import UsageError
from distcheck.machine.compat import has_step_hooks
from distcheck.training.adapters import names
from distcheck.training.adapters.called import calling
from distcheck.training.adapters.forms.own_optimizer import WatchedOptimizer
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import OptimizerProxy


def fits(target: Target) -> bool:
    """A class that is or takes an optimizer, or a function that makes one of an optimizer, as
    `DistributedOptimizer(optimizer, ...)` is in many libraries.
    """
    first = next(iter(target.required), None)
    if target.is_function and any(_changes_step(target, p.name) for p in target.parameters):
        return True
    if first is None or not _takes_optimizer(first):
        return False
    is_named_so = "optim" in target.name.lower() or target.name[:1].isupper()
    return target.is_class or (is_named_so and target.source.returns_what_it_calls)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Made from the workload's optimizer. Its step is begun where the gradients are final: where
    the optimizer inside, or torch's class that it is derived from, begins its own.
    """
    supplied = optimizer_name(target)
    if not supplied:
        raise refusal(target, f"strategy {target.spec!r} takes no optimizer: {target.signature}")
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
        # It may have given the optimizer another step, or hooks before its own.
        is_as_it_was = made is inner and "step" not in vars(inner) and not has_step_hooks(inner)
        if is_as_it_was:
            raise UsageError(
                f"{target.spec!r} made no optimizer with a step(), and left the step as it was"
            )
        return Around(made, inner, scene)

    finish, reset = target.adaptation.finish, target.adaptation.reset
    finish = "" if finish == names.NO_FINISH else finish
    how = f"finish {finish}()" if finish else "whose step() synchronizes"
    how += f", reset {reset}() before every step" if reset else ""
    called = {"sync": finish, "begun": reset}
    phases: Any = {
        moment: calling(scene, objects, name, target.described)
        for moment, name in called.items()
        if name
    }
    note = f"{target.name} around the optimizer, {how}"
    return target.loaded(note, optimizer=optimizer, update="optimizer", **phases)


def _changes_step(target: Target, name: str) -> bool:
    """Whether a parameter is an optimizer that is given another step, or hooks before its own."""
    assigned = target.source.attributes_of(name, assigned=True)
    hooked = "register_step_pre_hook" in target.source.attributes_of(name)
    return hooked or ("step" in assigned and meaning_of(name) in ("optimizer", ""))


def optimizer_name(target: Target) -> list[str]:
    """The parameter that takes the optimizer: by its name or annotation, else the first of a class
    or function that has one that must be given and whose name says nothing.
    """
    taken = named_parameters(target.value)
    changed = [p for p in taken if _changes_step(target, p.name)]
    unknown = [p for p in target.required[:1] if not meaning_of(p.name)]
    return [p.name for p in [*filter(_takes_optimizer, taken), *changed, *unknown]][:1]


def _takes_optimizer(parameter: inspect.Parameter) -> bool:
    return parameter.name in names.OPTIMIZERS or "Optimizer" in str(parameter.annotation)


class _OfBoth(dict[str, Any]):
    """A group of settings that are set in another group as well."""

    def __init__(self, inner: dict[str, Any], made: dict[str, Any]) -> None:
        super().__init__(inner)
        self._groups = (inner, made)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        for group in self._groups:
            group[key] = value


class Around(OptimizerProxy):
    """A user's optimizer around torch's own, `optim`; the loop sees both."""

    def __init__(
        self, made: Any, inner: torch.optim.Optimizer, scene: Scene, *, has_groups: bool = True
    ) -> None:
        super().__init__(inner)
        self._made, self.optim, self._scene = made, inner, scene
        self._has_groups = has_groups  # whether a schedule is given the groups of what was made

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those that a schedule is given: without groups of what was made torch's own, whose
        settings are those of the same group there as well, which may be copied in a step.
        """
        inner: list[dict[str, Any]] = self.optim.param_groups
        made: list[dict[str, Any]] = getattr(self._made, "param_groups", inner)
        if self._has_groups or made is inner or len(made) != len(inner):
            return made if self._has_groups else inner
        return [_OfBoth(*pair) for pair in zip(inner, made, strict=True)]

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
