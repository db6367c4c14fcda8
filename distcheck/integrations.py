"""Guards for the Hugging Face Trainer, Lightning and accelerate; each framework is imported when
its name is first used.

    from distcheck.integrations import TrainerGuard

    Trainer(model, arguments, callbacks=[TrainerGuard(every=100, on_check=wandb.log)])

TrainerGuard(...)              a callback for transformers.Trainer
LightningGuard(...)            a callback for lightning.Trainer
guard_accelerator(accelerator, ...)  guards every optimizer that accelerate prepared

Each takes the keyword arguments of `distcheck.guard`. `TrainerGuard` requires different random
numbers only with `randomness=True`, because the Trainer uses the same seed on all ranks.
"""

import inspect
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from distcheck.errors import CannotRunError, UsageError

if TYPE_CHECKING:
    from distcheck.job.guard.guarding import Guard

    LightningGuard: type
    TrainerGuard: type

__all__ = ["LightningGuard", "TrainerGuard", "guard_accelerator"]


def guard_accelerator(accelerator: Any, **settings: Any) -> "list[Guard]":
    """Guard every optimizer that an `accelerate.Accelerator` has prepared. Raises UsageError if
    there is none.
    """
    found = getattr(accelerator, "_optimizers", None)
    if not found:
        raise UsageError(
            "the accelerator has no optimizer; call guard_accelerator after accelerator.prepare"
        )
    return _Guards(settings).begin(found)


class _Guards:
    """The guards of a training, one for each optimizer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from distcheck.job.guard import guard

        try:
            inspect.signature(guard).bind(None, **settings)
        except TypeError as error:
            raise UsageError(f"{error}; distcheck.guard describes the arguments") from error
        self._guard, self._settings = guard, settings
        self._made: list[Guard] = []

    def begin(self, optimizers: Iterable[Any]) -> "list[Guard]":
        self.end(finishes=False)
        self._made = [self._guard(one, **self._settings) for one in optimizers]
        return self._made

    def end(self, *, finishes: bool = True) -> None:
        for guard in self._made:
            if finishes:
                guard.finish()
            guard.close()
        self._made = []


def _trainer_guard() -> type:
    transformers = _import_framework("transformers", "the Hugging Face Trainer")

    class TrainerGuard(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        """Guards the optimizer of a `transformers.Trainer` while it trains."""

        def __init__(self, **settings: Any) -> None:
            self._guards = _Guards({"randomness": False, **settings})

        def on_train_begin(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            if optimizer is None:
                raise UsageError("the Trainer has no optimizer when training begins")
            self._guards.begin([optimizer])

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._guards.end()

    return TrainerGuard


def _lightning_guard() -> type:
    callback = _import_framework("lightning.pytorch", "Lightning").Callback

    class LightningGuard(callback):  # type: ignore[misc, valid-type]
        """Guards every optimizer of a Lightning trainer while it trains."""

        def __init__(self, **settings: Any) -> None:
            self._guards = _Guards(settings)

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self._guards.begin(trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._guards.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._guards.end(finishes=False)

    return LightningGuard


def _import_framework(name: str, framework: str) -> Any:
    """Import a framework. Raises CannotRunError if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name not in (package, name):
            raise
        raise CannotRunError(f"{framework} is not installed; run pip install {package}") from error


_CLASSES = {"TrainerGuard": cache(_trainer_guard), "LightningGuard": cache(_lightning_guard)}


def __getattr__(name: str) -> Any:
    """Create a callback class on first use, since its base class is in the framework."""
    if name not in _CLASSES:
        raise AttributeError(f"module 'distcheck.integrations' has no attribute {name!r}")
    return _CLASSES[name]()


def __dir__() -> list[str]:
    return __all__
