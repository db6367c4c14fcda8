"""Objects that were written for distcheck: their methods, and defaults for those they lack."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.layouts import laid_out
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

ScaleLoss = Callable[[torch.Tensor, Step], torch.Tensor]
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def has_methods(target: Target) -> bool:
    """Whether it is an object (or a class of such) with wrap, sync, backward or scale_loss, or with
    `optimizer(build, parameters)` alone, whose optimizer exchanges; and no module.
    """
    value = target.value
    if inspect.isroutine(value) or isinstance(value, nn.Module):
        return False
    if inspect.isclass(value) and issubclass(value, nn.Module | torch.optim.Optimizer):
        return False
    own = ("wrap", "sync", "backward", "scale_loss")
    if any(callable(getattr(value, method, None)) for method in own):
        return True
    kind = value if inspect.isclass(value) else type(value)
    alone = set(own_names(kind)) - {"close"} == {"optimizer"}
    return alone and _takes_what_builds(getattr(kind, "optimizer"))  # noqa: B009


def _takes_what_builds(method: Any) -> bool:
    """Whether its parameters, after self, are what builds an optimizer and for what."""
    places = [p for p in inspect.signature(method).parameters.values() if p.kind in _BY_PLACE]
    return len(places) == 3 and all(p.default is p.empty for p in places)


def usual_method(value: Any) -> str:
    """The method that people call after backward, of a class or an object other than an optimizer:
    the first by a usual name, of a class its `__call__`, or the only public one; of a module's
    class, `forward` where it takes a model. Empty where there is none.
    """
    kind = value if inspect.isclass(value) else type(value)
    if inspect.isclass(value) and issubclass(kind, nn.Module) and _forwards_a_model(kind):
        return "forward"
    if inspect.isroutine(value) or inspect.ismodule(value) or _is_torchs_kind(kind):
        return ""
    own = own_names(kind)
    usual = next((name for name in names.FINISH if name in own), "")
    if not usual and inspect.isclass(value) and any("__call__" in vars(c) for c in kind.__mro__):
        return "__call__"
    return usual or (own[0] if len(own) == 1 else "")


def _forwards_a_model(kind: type[nn.Module]) -> bool:
    if "forward" not in own_names(kind):
        return False
    first = list(inspect.signature(kind.forward).parameters.values())[1:2]
    return [names.MEANINGS.get(p.name) for p in first] == ["model"]


def _is_torchs_kind(kind: type) -> bool:
    return issubclass(kind, nn.Module | torch.optim.Optimizer)


def own_names(build: type) -> list[str]:
    """Public methods that neither torch nor object has given it, in the order of definition."""
    theirs = [
        base for base in build.__mro__ if not base.__module__.startswith(("torch", "builtins"))
    ]
    kept = [(n, getattr(v, "__func__", v)) for base in theirs for n, v in vars(base).items()]
    found = [
        n for n, v in kept if inspect.isfunction(v)
    ]  # of static and class methods, what is run
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
        for name in ("wrap", "scale_loss", "close", "clip", "optimizer", "backward")
        if (method := getattr(made, name, None)) is not None
    }
    if "scale_loss" in found:
        found["scale_loss"] = adapt_scale_loss(target.spec, found["scale_loss"])
    sync = getattr(made, "sync", None)
    if sync is None and list(found) == ["scale_loss"]:
        others = [name for name in names.FINISH if name in own_names(type(made))]
        sync = getattr(made, others[0]) if others else None
    if sync is not None:
        found["sync"] = adapt_sync(target.spec, sync)
    loaded = LoadedStrategy(contract=contract, file=file, **found)
    return laid_out(loaded, made, what=repr(target.spec)) if contract.parallel else loaded


def adapt_scale_loss(spec: str, scale: Callable[..., Any]) -> ScaleLoss:
    """Accepts scale_loss(loss, step), and scale_loss(loss) as wrappers have it. Raises UsageError
    for anything else, and where it returns no tensor, on which backward could be called.
    """
    try:
        signature = inspect.signature(scale)
    except (TypeError, ValueError):
        return scale
    second = [p for p in signature.parameters.values() if p.kind in _BY_PLACE][1:2]
    takes_step = _takes(signature, 2) and any(
        p.default is p.empty or p.name == "step" for p in second
    )
    other = takes_step and names.MEANINGS.get(second[0].name, "step") != "step"
    if other or not (takes_step or _takes(signature, 1)):
        raise UsageError(
            f"strategy {spec!r} has the method scale_loss{signature}; expected is scale_loss(loss) "
            "or scale_loss(loss, step)"
        )

    def scaled(loss: torch.Tensor, step: Step) -> torch.Tensor:
        found = scale(loss, step) if takes_step else scale(loss)
        if not isinstance(found, torch.Tensor):
            raise UsageError(
                f"scale_loss of {spec!r} returned a {type(found).__name__}; expected is the loss "
                "that backward is called on, a tensor"
            )
        return found

    return scaled


def _takes(signature: inspect.Signature, count: int) -> bool:
    """Whether a call with so many arguments fits."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def adapt_sync(spec: str, sync: Callable[..., Any]) -> "Callable[[torch.nn.Module, Step], None]":
    """Accepts f(model), f(model, step), and f(model, step: int), which gets the step's index.

    Raises UsageError for anything else.
    """
    try:
        parameters = inspect.signature(sync).parameters.values()
    except (TypeError, ValueError):
        return sync
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    second = positional[1:2]
    takes_two = len(required) == 2 or variadic or [p.name for p in second] == ["step"]
    if keyword or len(required) > 2 or (not positional and not variadic):
        raise UsageError(
            f"strategy {spec!r} has the signature {sync.__name__}{inspect.signature(sync)}; "
            "expected is sync(model) or sync(model, step)"
        )
    asked = [p.name for p in second if names.MEANINGS.get(p.name, "step") != "step"]
    if len(required) == 2 and asked:
        raise UsageError(
            f"strategy {spec!r} has the signature {sync.__name__}{inspect.signature(sync)}, whose "
            f"second argument would be the step, and no {asked[0]}; where it is to be filled in, "
            f"name the method itself, such as {spec}.{sync.__name__}"
        )
    if takes_two and any(p.annotation in (int, "int") for p in second):
        return lambda model, step: sync(model, step.index)
    if takes_two:
        return sync

    def with_model_only(model: "torch.nn.Module", step: Step) -> None:
        sync(model)

    return with_model_only
