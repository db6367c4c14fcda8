"""An object with distcheck's methods: wrap, optimizer, backward, scale_loss, sync, close."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.layouts import with_unsharded_model
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target, public_method_names
from distcheck.training.loaded import LoadedStrategy, construct_object

ScaleLoss = Callable[[torch.Tensor, Step], torch.Tensor]
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def fits(target: Target) -> bool:
    """Return True for an object with distcheck's methods, or a class of such objects."""
    return _has_methods(target) and not (target.is_class and target.required)


def _has_methods(target: Target) -> bool:
    """Return True for an object (or a class of such) with wrap, sync, backward or scale_loss, or
    with only `optimizer(build, parameters)`, whose optimizer then synchronizes; False for a module.
    """
    value = target.value
    if inspect.isroutine(value) or isinstance(value, nn.Module):
        return False
    if inspect.isclass(value) and issubclass(value, nn.Module | torch.optim.Optimizer):
        return False
    methods = ("wrap", "sync", "backward", "scale_loss")
    if any(callable(getattr(value, method, None)) for method in methods):
        return True
    kind: Any = value if inspect.isclass(value) else type(value)
    alone = set(public_method_names(kind)) - {"close"} == {"optimizer"}
    taken = inspect.signature(kind.optimizer).parameters.values() if alone else ()
    places = [p for p in taken if p.kind in _BY_PLACE]  # self, a factory, the parameters
    return len(places) == 3 and all(p.default is p.empty for p in places)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return the object's methods. Different signatures of scale_loss and sync are adapted."""
    if not _has_methods(target):
        raise refusal_error(
            target, f"strategy {target.spec!r} has none of wrap, backward, sync and scale_loss"
        )
    made = construct_object(target.spec, target.value) if target.is_class else target.value
    methods = {
        name: method
        for name in ("wrap", "scale_loss", "close", "clip", "optimizer", "backward")
        if (method := getattr(made, name, None)) is not None
    }
    if "scale_loss" in methods:
        methods["scale_loss"] = adapt_scale_loss(target.spec, methods["scale_loss"])
    sync = getattr(made, "sync", None)
    if sync is None and list(methods) == ["scale_loss"]:
        others = [name for name in names.FINISH if name in public_method_names(type(made))]
        sync = getattr(made, others[0]) if others else None
    if sync is not None:
        methods["sync"] = _adapt_sync(target.spec, sync)
    loaded = target.loaded("", **methods)
    return (
        with_unsharded_model(loaded, made, what=repr(target.spec))
        if loaded.contract.parallel
        else loaded
    )


def adapt_scale_loss(spec: str, scale: Callable[..., Any]) -> ScaleLoss:
    """Accept scale_loss(loss, step), and a wrapper's scale_loss(loss). Raises UsageError for any
    other signature, and for a result that is not a tensor.
    """
    try:
        signature = inspect.signature(scale)
    except (TypeError, ValueError):
        return scale
    second = [p for p in signature.parameters.values() if p.kind in _BY_PLACE][1:2]
    takes_step = _accepts_arguments(signature, 2) and any(
        p.default is p.empty or p.name == "step" for p in second
    )
    other = takes_step and meaning_of(second[0].name) not in ("", "step")
    if other or not (takes_step or _accepts_arguments(signature, 1)):
        raise UsageError(
            f"strategy {spec!r} has the method scale_loss{signature}; expected scale_loss(loss) "
            "or scale_loss(loss, step)"
        )

    def scaled(loss: torch.Tensor, step: Step) -> torch.Tensor:
        made = scale(loss, step) if takes_step else scale(loss)
        if not isinstance(made, torch.Tensor):
            raise UsageError(
                f"scale_loss of {spec!r} returned a {type(made).__name__}; expected the loss for "
                "backward, a tensor"
            )
        return made

    return scaled


def _accepts_arguments(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _adapt_sync(spec: str, sync: Callable[..., Any]) -> Callable[[nn.Module, Step], None]:
    """Accept f(model), f(model, step), and f(model, step: int), which receives the step's index.
    Raises UsageError for any other signature.
    """
    try:
        parameters = inspect.signature(sync).parameters.values()
    except (TypeError, ValueError):
        return sync
    positional = [p for p in parameters if p.kind in _BY_PLACE]
    required = [p for p in positional if p.default is p.empty]
    keyword = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    second = positional[1:2]
    takes_two = len(required) == 2 or variadic or [p.name for p in second] == ["step"]
    if keyword or len(required) > 2 or (not positional and not variadic):
        raise UsageError(
            f"strategy {spec!r} has the signature {sync.__name__}{inspect.signature(sync)}; "
            "expected sync(model) or sync(model, step)"
        )
    other = [p.name for p in second if meaning_of(p.name) not in ("", "step")]
    if len(required) == 2 and other:
        raise UsageError(
            f"strategy {spec!r} has the signature {sync.__name__}{inspect.signature(sync)}, "
            f"whose second argument would be the step and not {other[0]}; if distcheck should "
            f"fill it in, pass the method itself, such as {spec}.{sync.__name__}"
        )
    if takes_two and any(p.annotation in (int, "int") for p in second):
        return lambda model, step: sync(model, step.index)
    return sync if takes_two else lambda model, step: sync(model)
