"""An optimizer's class whose step() synchronizes gradients, and then updates by itself.

Where it is derived from one of torch's optimizers, and its step() ends in that one's, gradients are
final where that one's step begins. If the workload trains with that very class, its step is the
update. Otherwise the step ends there: the workload's own optimizer updates with those gradients.
Where the optimizer's state is divided, each rank has the gradients of its own parameters alone, and
step() sends on what becomes of them: the workload's optimizer steps within, in that step's place.
If its step() never calls that one's, as a copy of it does not, the gradients are those that it
leaves, and what it made of the parameters is its update, or is undone in the same way.

Where it has an update of its own, that is plain SGD or nothing is known of it: gradients are then
taken from what it writes into parameters of zero, as in `steps_inside`.
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
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.optimizers import OptimizerProxy


def fits(target: Target) -> bool:
    """An optimizer's class that takes parameters, and has a step() of its own."""
    if not target.is_class or not issubclass(target.value, torch.optim.Optimizer):
        return False
    return not target.value.__module__.startswith("torch.optim") and bool(
        parameters_name(target.value)
    )


def adapt(target: Target, scene: Scene, *, is_divided: bool = False) -> LoadedStrategy:
    """Made of the workload's parameters; its step() is called where the optimizer's would be."""
    if not fits(target):
        raise refusal(target, f"strategy {target.spec!r} is not an optimizer class")
    base = _torchs_own(target.value)
    if base is None:
        return _by_its_update(target, scene)
    return _by_its_base(target, scene, base, is_divided=is_divided)


def parameters_name(kind: type) -> str:
    """The parameter of its constructor that takes parameters; empty where none does."""
    taken = [p.name for p in named_parameters(kind)]
    return next((n for n in taken if n in names.PARAMETERS or n.startswith("param")), "")


def _torchs_own(made: type) -> type[torch.optim.Optimizer] | None:
    """The optimizer of torch's that it is derived from; None where that is only the base class."""
    for each in made.__mro__[1:]:
        if each is torch.optim.Optimizer:
            return None
        if each.__module__.startswith("torch.optim.") and issubclass(each, torch.optim.Optimizer):
            return each
    return None


class WatchedOptimizer(OptimizerProxy):
    """What the loop sees in place of an optimizer: its groups and state, and where the step of
    torch's class begins, in whose place `instead` steps, if there is one.
    """

    def __init__(
        self, made: Any, base: type, scene: Scene, *, updates: bool, instead: Any = None
    ) -> None:
        super().__init__(instead or made)
        self.optim = instead or made  # whose state is compared
        self._made, self._base, self._scene = made, base, scene
        self._updates, self._instead = updates, instead
        self._is_copy = "step" in vars(type(made)) and not Source(type(made).step).words & {"super"}
        self._begun: list[Callable[..., Any]] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Its own."""
        self._made.zero_grad()

    def before_update(self, begins: Callable[..., Any]) -> Any:
        """Makes `begins` called where gradients are final; returns a handle with `remove()`."""
        self._begun = [begins]
        return self

    def remove(self) -> None:
        """Calls nothing any more."""
        self._begun = []

    def step(self) -> None:
        """Its own, with the step of torch's class watched."""
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


def _by_its_base(
    target: Target, scene: Scene, base: type[torch.optim.Optimizer], *, is_divided: bool
) -> LoadedStrategy:
    filling = _filling(target, scene)
    watched: list[WatchedOptimizer] = []

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        inner = build(parameters)
        scene.optimizer = inner  # whose learning rate may be asked for
        is_same = type(inner) is base
        # With all that its groups have: a schedule may read more than settings (initial_lr).
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
                f"{target.spec!r} never called the step() of {base.__name__}, from which it is "
                "derived, so its gradients are not seen; split it in two and give the part that "
                "synchronizes"
            )

    return target.loaded(
        f"{target.name} in the optimizer's place, or before it where the workload trains with "
        f"another than {base.__name__}; gradients are those with which {base.__name__}'s step "
        "begins",
        optimizer=optimizer,
        sync=sync,
        update="optimizer",
    )


def _by_its_update(target: Target, scene: Scene) -> LoadedStrategy:
    settings = [p.name for p in named_parameters(target.value)]
    rate = next((name for name in settings if names.meaning_of(name) == "rate"), "")
    if not rate:
        raise refusal(
            target,
            f"strategy {target.spec!r} is an optimizer with its own update and no parameter lr, "
            "so gradients cannot be derived from its step",
        )
    scene.rate = RATE
    filling = _filling(target, scene, rate)
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
        f"parameters of zero, divided by a learning rate of {RATE:g}; the step is the workload's",
        optimizer=optimizer,
        sync=sync,
        close=close,
    )


def _filling(target: Target, scene: Scene, *also: str) -> Filling:
    return Filling(
        scene,
        target.value,
        what=f"strategy {target.spec!r}",
        supplied=[parameters_name(target.value)],
        also=also,
    )
