"""Objects that were written for distcheck: their methods, and defaults for those they lack."""

import inspect
from typing import Any

import torch
from torch import nn

from distcheck.adapters import names
from distcheck.adapters.target import Target
from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.loading import LoadedStrategy, adapt_sync, source_file


def has_methods(target: Target) -> bool:
    """Whether it is an object (or a class of such) with wrap, sync, backward or scale_loss, and no
    module.
    """
    value = target.value
    if inspect.isroutine(value) or isinstance(value, nn.Module):
        return False
    if inspect.isclass(value) and issubclass(value, nn.Module | torch.optim.Optimizer):
        return False
    own = ("wrap", "sync", "backward", "scale_loss")
    return any(callable(getattr(value, method, None)) for method in own)


def usual_method(value: Any) -> str:
    """The method that people call after backward, of a class or an object that is neither a module
    nor an optimizer: the first by a usual name, or the only public one; empty where there is none.
    """
    kind = value if inspect.isclass(value) else type(value)
    if inspect.isroutine(value) or inspect.ismodule(value) or _is_torchs_kind(kind):
        return ""
    own = own_names(kind)
    return next((name for name in names.FINISH if name in own), own[0] if len(own) == 1 else "")


def _is_torchs_kind(kind: type) -> bool:
    return issubclass(kind, nn.Module | torch.optim.Optimizer)


def own_names(build: type) -> list[str]:
    """Public methods that neither torch nor object has given it, in the order of definition."""
    theirs = [
        base for base in build.__mro__ if not base.__module__.startswith(("torch", "builtins"))
    ]
    found = [n for base in theirs for n, v in vars(base).items() if inspect.isfunction(v)]
    public = [name for name in dict.fromkeys(found) if not name.startswith("_")]
    return [name for name in public if callable(getattr(build, name))]


def construct(target: Target) -> Any:
    """An object of a class that needs no arguments. Raises UsageError."""
    try:
        return target.value()
    except Exception as error:
        raise UsageError(
            f"{target.spec!r} is a class, and {target.name}() raised "
            f"{type(error).__name__}: {error}"
        ) from error


def as_strategy(target: Target) -> LoadedStrategy:
    """A strategy of the methods that it has."""
    contract = contract_of(target.value)
    file = source_file(target.value)
    made = construct(target) if target.is_class else target.value
    found = {
        name: method
        for name in ("wrap", "scale_loss", "close", "optimizer", "backward")
        if (method := getattr(made, name, None)) is not None
    }
    sync = getattr(made, "sync", None)
    if sync is None and list(found) == ["scale_loss"]:
        others = [name for name in names.FINISH if name in own_names(type(made))]
        sync = getattr(made, others[0]) if others else None
    if sync is not None:
        found["sync"] = adapt_sync(target.spec, sync)
    return LoadedStrategy(contract=contract, file=file, **found)


def plain_wrap(model: nn.Module) -> nn.Module:
    """The model itself."""
    return model


def plain_step(model: nn.Module, step: Step) -> None:
    """Nothing."""
