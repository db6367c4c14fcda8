"""Objects that were written for distcheck: their methods, and defaults for those they lack."""

import inspect
from typing import Any

import torch
from torch import nn

from distcheck.adapters.target import Target
from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.loading import LoadedStrategy, adapt_sync, source_file


def has_methods(target: Target) -> bool:
    """Whether it is an object (or a class of such) with wrap, sync or backward, and no module."""
    value = target.value
    if inspect.isroutine(value) or isinstance(value, nn.Module):
        return False
    if inspect.isclass(value) and issubclass(value, nn.Module | torch.optim.Optimizer):
        return False
    return any(callable(getattr(value, method, None)) for method in ("wrap", "sync", "backward"))


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
    if sync is not None:
        found["sync"] = adapt_sync(target.spec, sync)
    return LoadedStrategy(contract=contract, file=file, **found)


def plain_wrap(model: nn.Module) -> nn.Module:
    """The model itself."""
    return model


def plain_step(model: nn.Module, step: Step) -> None:
    """Nothing."""
