"""A class (or function) that takes the module, and is trained in its place or next to it.

With `--as autograd`, parameters or activations pass through a function whose backward averages over
the ranks. No hook can observe the local gradients, so they are not compared.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, LossOf, Step
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.called import call_of_method
from distcheck.training.adapters.forms.strategy import adapt_scale_loss
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import (
    Target,
    author_classes,
    author_methods,
    name_of_start_method,
    named_parameters,
    parameter_meaning,
    public_method_names,
    required_parameters,
)
from distcheck.training.loaded import LoadedStrategy

_BY_HOOKS = "created once before training: it registers hooks; nothing is called after backward"


def fits(target: Target) -> bool:
    """Return True for a class constructed from a module or parameters, and for its methods."""
    made = target.owner if target.is_unbound else target.value if target.is_class else None
    if made is None or issubclass(made, torch.optim.Optimizer):
        return False
    parameters = required_parameters(named_parameters(made))
    meanings = [parameter_meaning(made, p) for p in parameters]
    agents = meanings.count("model") > 1 or not all(map(_is_there, meanings))
    if target.is_unbound and agents:
        return False  # a method of a trainer or an agent is meant
    return any(meaning == "model" or meaning.endswith("parameters") for meaning in meanings)


def _is_there(meaning: str) -> bool:
    """Return True if a constructor argument is known before training."""
    later = ("optimizer", "step", "index", "rate", "samples", "gradients", "arguments")
    return bool(meaning) and meaning not in later


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that constructs the wrapper in place of DDP and calls its methods."""
    loaded = adapt_wrapper(target, scene, in_pieces=False)
    if target.adaptation.form != "autograd":
        return loaded
    note = f"{loaded.note}; it averages within backward, so local gradients are not recorded"
    return loaded.with_contract(note=note, sync="out-of-sight")


def adapt_wrapper(target: Target, scene: Scene, *, in_pieces: bool) -> LoadedStrategy:
    """Return the strategy of `adapt`. With `in_pieces`, the wrapper may hold parameters that are
    not the module's. If several objects are constructed, methods are called on the last.
    """
    build: Callable[..., Any] = target.owner if target.is_unbound else target.value  # type: ignore[assignment]
    supplied = _module_name(build)
    what = f"strategy {target.spec!r}"
    filling = Filling(scene, build, what=what, supplied=supplied)
    finish, reset = phase_methods(target)
    for option, name in (("--finish", finish), ("--reset", reset)):
        _check_method(target, build, name, option, scene)
    clears = _usual_method(build, ["zero_grad"])
    has_none = target.adaptation.finish == names.NO_FINISH and not finish
    is_trained = _is_trained(build)
    hooks = inspect.isclass(build) and any(Source(c).registers_hooks for c in author_classes(build))
    first = "" if is_trained else name_of_start_method(build, takes="")
    first = "" if first in (finish, reset) else first
    if not is_trained and not has_none and not hooks and not finish and not first:
        raise refusal_error(
            target,
            f"{what} takes a module, and no method has a conventional name for a call after "
            f"backward (it has {_method_names(build)}); pass --finish METHOD, or --finish none if "
            "its constructor is sufficient",
        )
    made: list[Any] = []

    def wrap(model: nn.Module) -> nn.Module:
        before = {id(p): p.shape for p in model.parameters()}
        made.append(filling.call(*([model] if supplied else [])))
        trained = _as_module(target, model, made[-1]) if is_trained else model
        if first:
            answer = getattr(made[-1], first)()
            trained = answer if isinstance(answer, nn.Module) else trained
        if not in_pieces:
            _refuse_other_parameters(target, before, trained)
        return trained

    def scaled(loss: torch.Tensor, step: Step) -> torch.Tensor:
        method = adapt_scale_loss(target.spec, made[-1].scale_loss) if scales else None
        return loss if method is None else method(loss, step)

    def backward(loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        scene.step = step
        loss = loss_of(batch)
        made[-1].backward(loss)
        return loss.detach()

    runs_backward, scales = _takes_loss(build), "scale_loss" in author_methods(build)
    begins = f", reset {reset}() before every step" * bool(reset)
    begins += ", its scale_loss() before backward" * scales
    begins += ", its zero_grad() in place of the optimizer's" * bool(clears)
    begins += ", its backward(loss) in place of the loss's" * runs_backward
    how = f"no finish call among {_method_names(build)}"
    how = _BY_HOOKS if hooks and not is_trained else how
    how = "nothing is called after backward, as requested" if has_none else how
    how = f"finish {finish}()" if finish else how
    begins += f", {first}() called once before training" * bool(first)
    begins += "; pass --as method to call it without the constructor" * target.is_unbound
    return target.loaded(
        f"{target.name} around the module, {how}{begins}",
        wrap=wrap,
        sync=call_of_method(scene, made, finish, what),
        begun=call_of_method(scene, made, reset if reset != clears else "", what),
        zero_grad=call_of_method(scene, made, clears, what) if clears else None,
        scale_loss=scaled,
        backward=backward if runs_backward else None,
    )


def _takes_loss(build: Any) -> bool:
    if (
        not inspect.isclass(build)
        or "backward" not in public_method_names(build)
        or issubclass(build, torch.autograd.Function)
    ):
        return False
    return len(required_parameters(named_parameters(getattr(build, "backward"), skip=1))) == 1  # noqa: B009


def _module_name(build: Callable[..., Any]) -> list[str]:
    """Return the parameter that takes the module: by its name or annotation, else the first."""
    taken = named_parameters(build)
    meanings = {p.name: parameter_meaning(build, p) for p in taken}
    of_module = [name for name, meaning in meanings.items() if meaning == "model"]
    return of_module[:1] or [p.name for p in taken[:1] if not meanings[p.name]]


def _is_trained(build: Callable[..., Any]) -> bool:
    """Return True if the constructed object replaces the module; unknown for functions."""
    if not inspect.isclass(build) or issubclass(build, nn.Module):
        return True
    members = {name for base in build.__mro__ if base is not object for name in vars(base)}
    return bool(members & {"forward", "__call__"})


def _method_names(build: Callable[..., Any]) -> str:
    if not inspect.isclass(build):
        return "its methods"
    methods = [
        n for n in public_method_names(build) if n not in ("forward", "parameters", "state_dict")
    ]
    return ", ".join(methods) or "its methods, of which there are none"


def phase_methods(target: Target) -> tuple[str, str]:
    """Return the methods to call after backward and before every step: those set by options, or
    else those with common names. After backward, also the only method of an object that is not
    itself the trained module. Empty if there is none.
    """
    said = target.adaptation
    build: Any = target.owner if target.is_unbound else target.value
    finish = target.name if target.is_unbound else said.finish
    if finish is None:
        finish = _usual_method(build, names.FINISH) or _only_method(build)
    if finish == names.NO_FINISH and not hasattr(build, names.NO_FINISH):
        finish = ""
    return finish, said.reset if said.reset is not None else _usual_method(build, names.RESET)


def _usual_method(build: Any, usual: Sequence[str]) -> str:
    """Return the first method with one of these names whose arguments are known."""
    methods = public_method_names(build) if inspect.isclass(build) else []
    return next((n for n in usual if n in methods and can_fill_arguments(getattr(build, n))), "")


def _check_method(
    target: Target, build: Callable[..., Any], name: str, option: str, scene: Scene
) -> None:
    """Raise UsageError for a method that a class does not have, or that cannot be called."""
    if not name or not inspect.isclass(build):
        return
    if not callable(getattr(build, name, None)):
        raise UsageError(
            f"{option} {name}: {target.name} has no such method; it has {_method_names(build)}"
        )
    Filling(scene, getattr(build, name), what=f"{option} {name}", skip=1)


def can_fill_arguments(method: Callable[..., Any]) -> bool:
    """Return True if all required arguments, except the object itself, can be filled in."""
    return all(meaning_of(p.name) for p in required_parameters(named_parameters(method, skip=1)))


def _only_method(build: Callable[..., Any]) -> str:
    """Return the only method of an object that does not replace the model, if it can be called;
    empty for objects that register hooks.
    """
    if _is_trained(build) or any(Source(c).registers_hooks for c in author_classes(build)):
        return ""
    methods = public_method_names(build) if inspect.isclass(build) else []
    methods = [name for name in methods if name != name_of_start_method(build, takes="")]
    return (
        methods[0] if len(methods) == 1 and can_fill_arguments(getattr(build, methods[0])) else ""
    )


def _as_module(target: Target, model: nn.Module, made: Any) -> nn.Module:
    """Return the constructed object as a module. Raises UsageError."""
    if not isinstance(made, nn.Module):
        forward = getattr(made, "forward", None) or made
        if not callable(forward):
            raise UsageError(
                f"{target.spec!r} created a {type(made).__name__}, which is not a module"
            )
        made = ModuleAroundWrapper(model, forward, made)
    trained: nn.Module = made
    return trained


def _refuse_other_parameters(
    target: Target, before: dict[int, torch.Size], trained: nn.Module
) -> None:
    """Raise UsageError if it trains other parameters than the model's, or shards of them."""
    # Its own parameters() may return nothing.
    parameters = list(trained.parameters()) or [p for _, p in nn.Module.named_parameters(trained)]
    after = {id(p): p.shape for p in parameters}
    if any(after.get(key) != shape for key, shape in before.items()):
        raise UsageError(
            f"{target.spec!r} trains parameters other than those of its module: if they are "
            "shards, as in FSDP, pass --as sharded-module; copies are not supported"
        )


class ModuleAroundWrapper(nn.Module):
    """A module for a wrapper that is not a module. It has the forward of the wrapper, and the
    parameters of the wrapper or of the model.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], made: Any) -> None:
        super().__init__()
        self.carried = model
        self._forward, self._made = forward, made
        for name in ("no_sync", "set_requires_gradient_sync"):  # the loop looks for these
            if callable(method := getattr(made, name, None)):
                setattr(self, name, method)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the wrapper's parameters, if it has such a method."""
        of_wrapper = getattr(self._made, "parameters", None)
        return iter(of_wrapper()) if callable(of_wrapper) else super().parameters(recurse)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._forward(*inputs, **named)
