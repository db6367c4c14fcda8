"""A context manager that synchronises: entered before backward, left after it."""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import unwrapped
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 12
EXAMPLE = "with f(model): loss.backward(), a context manager around backward"


def fits(target: Target) -> bool:
    """A function that contextlib has made one, or a class with __enter__ and __exit__ that is
    nothing else besides: no module, and without a method to call after backward.
    """
    if not target.is_class:
        return is_context_function(target.value) and not target.is_unbound
    has_both = all(hasattr(target.value, name) for name in ("__enter__", "__exit__"))
    others = (*names.FINISH, "forward", "__call__", "wrap", "step")
    is_more = any(name in vars(base) for base in target.value.__mro__ for name in others)
    return has_both and not is_more and not issubclass(target.value, nn.Module)


def is_context_function(value: Any) -> bool:
    """Whether calling it gives a context manager, by `contextlib.contextmanager`."""
    inner = getattr(unwrapped(value), "__wrapped__", None)
    return inspect.isgeneratorfunction(inner)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called in every step, entered when backward begins, left when it has ended. Where the loop
    accumulates, all of a step's backwards are within it.
    """
    if not callable(target.value) or target.is_unbound:
        raise refusal(target, f"strategy {target.spec!r} is not a context manager")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    supplied = _subject(target, scene)
    filling = Filling(scene, target.value, what=what, supplied=supplied)
    entered: list[AbstractContextManager[Any]] = []

    def enter(loss: torch.Tensor, step: Step) -> torch.Tensor:
        if not entered:
            given = scene.live_model
            taken = given.parameters() if target.kind_of_first == "parameters" else given
            made = filling.call(*([taken] if supplied else []))
            if not hasattr(made, "__exit__"):
                raise UsageError(
                    f"{target.spec!r} returned a {type(made).__name__}; a context manager is "
                    "expected; name the form with --as"
                )
            made.__enter__()
            entered.append(made)
        return loss

    def leave(model: nn.Module, step: Step) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        scale_loss=enter,
        sync=leave,
        note=f"{target.signature}, a context manager: entered before backward, left after it",
    )


def _subject(target: Target, scene: Scene) -> list[str]:
    """The parameter that takes the model or its parameters."""
    told = {name for name, _ in target.adaptation.arguments}
    found = [p.name for p in named_parameters(target.value) if p.name not in told]
    if target.first not in found:
        return []
    meaning = scene.meaning_of(target.first)
    return [target.first] if meaning in ("", "model", "parameters") else []
