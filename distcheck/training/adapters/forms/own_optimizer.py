"""An optimizer class whose step() synchronizes gradients, and then updates the parameters.

If it is derived from one of torch's optimizers and its step() ends in the base step, gradients are
final when the base step begins. If the workload trains with that base class, the base step is the
update. Otherwise the base step is skipped, and the workload's optimizer updates with these
gradients. If the optimizer state is sharded, each rank has only the gradients of its parameters,
and step() distributes the updated ones: the workload's optimizer then steps in place of the base
step.

If step() never calls the base step, because it is a copy of it, the gradients are those that remain
after it, and its change of the parameters is the update, or is undone in the same way.

A custom update must be plain SGD: gradients are then derived from the values that it writes into
zero parameters, as in `steps_inside`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from distcheck.contract import Build, Step
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.forms.steps_inside import RATE, take_gradients
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import OptimizerProxy


def fits(target: Target) -> bool:
    """Return True for an optimizer class that takes parameters, and defines step()."""
    if not target.is_class or not issubclass(target.value, torch.optim.Optimizer):
        return False
    return not target.value.__module__.startswith("torch.optim") and bool(
        parameters_name(target.value)
    )


def adapt(target: Target, scene: Scene, *, is_divided: bool = False) -> LoadedStrategy:
    """Return a strategy that constructs the class from the workload's parameters, and calls its
    step() in place of the optimizer's. Raises UsageError.
    """
    if not fits(target):
        raise refusal_error(target, f"strategy {target.spec!r} is not an optimizer class")
    base = _torch_base(target.value)
    if base is None:
        return _adapt_by_update(target, scene)
    return _adapt_by_base(target, scene, base, is_divided=is_divided)


def parameters_name(kind: type) -> str:
    """Return the constructor parameter for the model's parameters; empty if there is none."""
    taken = [p.name for p in named_parameters(kind)]
    return next((n for n in taken if n in names.PARAMETERS or n.startswith("param")), "")


def _torch_base(made: type) -> type[torch.optim.Optimizer] | None:
    """Return the torch optimizer that it derives from; None if only the abstract base class."""
    bases = [one for one in made.__mro__[1:] if issubclass(one, torch.optim.Optimizer)]
    first = next(one for one in bases if one.__module__.startswith("torch.optim."))
    return None if first is torch.optim.Optimizer else first


class WatchedOptimizer(OptimizerProxy):
    """Stand-in for an optimizer in the loop. It has the optimizer's groups and state, and reports
    the start of the step of torch's class. `instead` replaces that step, if given.
    """

    def __init__(
        self, made: Any, base: type, scene: Scene, *, updates: bool, instead: Any = None
    ) -> None:
        super().__init__(instead or made)
        self.optim = instead or made  # its state is compared
        self._made, self._base, self._scene = made, base, scene
        self._updates, self._instead = updates, instead
        self._is_copy = "step" in vars(type(made)) and not Source(type(made).step).words & {"super"}
        self._begun: list[Callable[..., Any]] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._made.zero_grad()

    def before_update(self, begins: Callable[..., Any]) -> Any:
        """Register `begins`, called once gradients are final; its handle has `remove()`."""
        self._begun = [begins]
        return self

    def remove(self) -> None:
        self._begun = []

    def step(self) -> None:
        """Run the optimizer's step, observing the step of torch's class."""
        is_undone = not (self._updates or self._instead)
        held = [] if not is_undone else [p.detach().clone() for p in self._scene.parameters()]
        with self._watching() as began:
            Filling(self._scene, self._made.step, what="its step()").call()
        if not began and self._is_copy:
            for begins in self._begun:
                begins()
            for parameter, kept in zip(self._scene.parameters(), held, strict=False):
                parameter.data.copy_(kept)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[list[int]]:
        base: Any = self._base
        began = list[int]()
        original = base.step

        def watched(optimizer: Any, *handed: Any, **named: Any) -> Any:
            if optimizer is not self._made:
                return original(optimizer, *handed, **named)
            began.append(1)
            for begins in self._begun:
                begins()
            if self._instead is not None:
                return self._instead.step()
            return original(optimizer, *handed, **named) if self._updates else None

        watched.hooked = True  # type: ignore[attr-defined]  # torch would wrap it for its profiler
        base.step = watched
        try:
            yield began
        finally:
            base.step = original


def _adapt_by_base(
    target: Target, scene: Scene, base: type[torch.optim.Optimizer], *, is_divided: bool
) -> LoadedStrategy:
    filling = _make_filling(target, scene)
    watched: list[WatchedOptimizer] = []

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        inner = build(parameters)
        scene.optimizer = inner  # its learning rate may be requested
        is_same = type(inner) is base
        # Copy all entries of the groups: a scheduler may read more than settings (initial_lr).
        groups = [
            dict(group) if is_same else {"params": group["params"]} for group in inner.param_groups
        ]
        instead = inner if is_divided and not is_same else None
        made = WatchedOptimizer(filling.call(groups), base, scene, updates=is_same, instead=instead)
        watched[:] = [made]
        return made if is_same or is_divided else inner

    def sync(model: nn.Module, step: Step) -> None:
        (made,) = watched
        if isinstance(scene.optimizer, WatchedOptimizer):
            return  # its step() follows
        begun: list[int] = []
        handle = made.before_update(lambda: begun.append(1))
        made.step()
        handle.remove()
        if not begun:
            raise UsageError(
                f"{target.spec!r} never called the step() of {base.__name__}, its base class, so "
                "its gradients are not recorded; split it in two and pass the part that "
                "synchronizes"
            )

    return target.loaded(
        f"{target.name} in place of the optimizer, or before it if the workload does not use "
        f"{base.__name__}; gradients are recorded at the start of {base.__name__}'s step",
        optimizer=optimizer,
        sync=sync,
        update="optimizer",
    )


def _adapt_by_update(target: Target, scene: Scene) -> LoadedStrategy:
    settings = [p.name for p in named_parameters(target.value)]
    rate = next((name for name in settings if names.meaning_of(name) == "rate"), "")
    if not rate:
        raise refusal_error(
            target,
            f"strategy {target.spec!r} is an optimizer with its own update and no parameter lr, "
            "so gradients cannot be derived from its step",
        )
    scene.rate = RATE
    filling = _make_filling(target, scene, rate)
    made: list[Any] = []

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        inner = build(parameters)
        scene.optimizer = inner
        trained = [p for group in inner.param_groups for p in group["params"]]
        made[:] = [filling.call(trained)]
        return inner

    def call() -> None:
        Filling(scene, made[0].step, what="its step()").call()

    sync, close = take_gradients(target, scene, call, RATE)
    return target.loaded(
        f"{target.name}, an optimizer whose step() synchronizes: gradients are its update of "
        f"zero parameters, divided by a learning rate of {RATE:g}; the step is the workload's",
        optimizer=optimizer,
        sync=sync,
        close=close,
    )


def _make_filling(target: Target, scene: Scene, *also: str) -> Filling:
    return Filling(
        scene,
        target.value,
        what=f"strategy {target.spec!r}",
        supplied=[parameters_name(target.value)],
        also=also,
    )
