"""A class (or function) that takes the module, and is trained in its place or beside it."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.gradients import wait_for
from distcheck.training.adapters.methods import adapt_scale_loss, own_names
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 20
EXAMPLE = (
    "class Wrapper(module, ...); --finish METHOD after backward, --reset METHOD after the step"
)
_FROM_TORCH = frozenset(dir(nn.Module))


def fits(target: Target) -> bool:
    """A class whose constructor takes a module or its parameters, or a method of such a class."""
    made = target.owner if target.is_unbound else target.value if target.is_class else None
    if made is None or issubclass(made, torch.optim.Optimizer):
        return False
    meanings = [names.MEANINGS.get(p.name, "") for p in _required(made)]
    agents = meanings.count("model") > 1 or not all(map(_is_there, _required(made), meanings))
    if target.is_unbound and agents:
        return False  # a trainer or an agent, of which one method is meant
    if "model" in meanings or any("Module" in str(p.annotation) for p in _required(made)):
        return True
    return any(meaning.endswith("parameters") for meaning in meanings)


def _is_there(parameter: inspect.Parameter, meaning: str) -> bool:
    """Whether it is known before training, when a wrapper is made."""
    later = ("optimizer", "step", "index", "rate", "samples", "gradients", "arguments")
    is_module = "Module" in str(parameter.annotation)
    return is_module or (bool(meaning) and meaning not in later)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Made in place of DDP's constructor, with the methods called that a loop would call."""
    return adapt_wrapper(target, scene, in_pieces=False)


def adapt_wrapper(target: Target, scene: Scene, *, in_pieces: bool) -> LoadedStrategy:
    """The same; what is made may hold other parameters than the module's if they are `in_pieces`.
    It may be made several times: methods are called on the last.
    """
    build: Callable[..., Any] = target.owner if target.is_unbound else target.value  # type: ignore[assignment]
    supplied = _module_name(build)
    what = f"strategy {target.spec!r}"
    filling = Filling(scene, build, what=what, supplied=supplied)
    finish = target.name if target.is_unbound else target.adaptation.finish
    has_none = finish == names.NO_FINISH and not hasattr(build, names.NO_FINISH)
    finish = "" if has_none else _method(target, build, finish, names.FINISH, "--finish", scene)
    reset = _method(target, build, target.adaptation.reset, names.RESET, "--reset", scene)
    clears = _method(target, build, None, ["zero_grad"], "", scene)
    is_trained = _is_trained(build)
    hooks = inspect.isclass(build) and _registers_hooks(build)
    if not is_trained and not finish and not has_none and not hooks:
        finish = _only_method(build, scene)
    if not is_trained and not finish and not has_none and not hooks:
        raise refusal(
            target,
            f"{what} takes a module, and no method has a usual name for what runs after "
            f"backward (it has {_own_methods(build)}); give --finish METHOD, or --finish "
            "none where its constructor does all",
        )
    made: list[Any] = []

    def wrap(model: nn.Module) -> nn.Module:
        before = {id(p): p.shape for p in model.parameters()}
        made.append(filling.call(*([model] if supplied else [])))
        trained = _trained(target, model, made[-1]) if is_trained else model
        if not in_pieces:
            _check_own(target, before, trained)
        return trained

    def calling(name: str) -> Callable[[nn.Module, Step], None]:
        def call(model: nn.Module, step: Step) -> None:
            if not name:
                return
            scene.step = step
            method = getattr(made[-1], name, None)
            if not callable(method):
                raise UsageError(f"{what} made an object without a method {name}()")
            wait_for(Filling(scene, method, what=f"{what}, {name}").call())

        return call

    def scaled(loss: torch.Tensor, step: Step) -> torch.Tensor:
        if not scales:
            return loss
        return adapt_scale_loss(target.spec, made[-1].scale_loss)(loss, step)

    scales = inspect.isclass(build) and "scale_loss" in own_names(build)
    begins = f", reset {reset}() before every step" if reset else ""
    begins += ", its scale_loss() before backward" if scales else ""
    begins += ", its zero_grad() in place of the optimizer's" if clears else ""
    how = f"finish {finish}()" if finish else f"no finish call among {_own_methods(build)}"
    how = "nothing is called after backward, as was said" if has_none else how
    if hooks and not finish and not has_none and not is_trained:
        how = "made once before training: it registers hooks; nothing is called after backward"
    begins += "; --as method calls it on an object that was never made" * target.is_unbound
    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        wrap=wrap,
        sync=calling(finish),
        begun=calling(reset if reset != clears else ""),
        zero_grad=calling(clears) if clears else None,
        scale_loss=scaled,
        note=f"{target.name} around the module, {how}{begins}",
    )


def _registers_hooks(build: type) -> bool:
    """Whether it, or a class that it is derived from and that is not torch's, registers hooks."""
    own = [base for base in build.__mro__ if not base.__module__.startswith(("torch", "builtins"))]
    return any(Source(base).registers_hooks for base in own)


def _required(build: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in named_parameters(build) if p.default is p.empty]


def _module_name(build: Callable[..., Any]) -> list[str]:
    """The parameter that takes the module: by its name or annotation, else the first."""
    found = named_parameters(build)
    for p in found:
        if names.MEANINGS.get(p.name) == "model" or "Module" in str(p.annotation):
            return [p.name]
    if found and not names.MEANINGS.get(found[0].name):
        return [found[0].name]
    return []


def _is_trained(build: Callable[..., Any]) -> bool:
    """Whether what is made takes the module's place. What a function returns will be seen."""
    if not inspect.isclass(build):
        return True
    if issubclass(build, nn.Module):
        return True
    return any(name in dir(build) and name in _members(build) for name in ("forward", "__call__"))


def _members(build: type) -> set[str]:
    return {name for base in build.__mro__ if base is not object for name in vars(base)}


def _own_methods(build: Callable[..., Any]) -> str:
    if not inspect.isclass(build):
        return "its methods"
    own = [n for n in own_names(build) if n not in ("forward", "parameters", "state_dict")]
    return ", ".join(own) or "its methods, of which there are none"


def _method(
    target: Target,
    build: Callable[..., Any],
    asked: str | None,
    usual: Sequence[str],
    option: str,
    scene: Scene,
) -> str:
    """The method to call: as asked for, or the first of the usual ones that can be."""
    if asked is not None:
        if inspect.isclass(build) and not callable(getattr(build, asked, None)):
            raise UsageError(
                f"{option} {asked}: {target.name} has no such method; it has {_own_methods(build)}"
            )
        if inspect.isclass(build):
            Filling(scene, getattr(build, asked), what=f"{option} {asked}", skip=1)
        return asked
    if not inspect.isclass(build):
        return ""
    own = own_names(build)
    for name in usual:
        if name not in own:
            continue
        method = getattr(build, name)
        left = [p for p in named_parameters(method, skip=1) if p.default is p.empty]
        if all(names.MEANINGS.get(p.name) for p in left):
            return name
    return ""


def _only_method(build: Callable[..., Any], scene: Scene) -> str:
    """The method of an object beside the model that has no other one, if it can be called."""
    own = own_names(build) if inspect.isclass(build) else []
    if len(own) != 1:
        return ""
    left = named_parameters(getattr(build, own[0]), skip=1)
    known = all(p.default is not p.empty or scene.meaning_of(p.name) for p in left)
    return own[0] if known else ""


def _trained(target: Target, model: nn.Module, made: Any) -> nn.Module:
    """What was made, as a module. Raises UsageError."""
    if not isinstance(made, nn.Module):
        forward = getattr(made, "forward", None) or made
        if not callable(forward):
            raise UsageError(f"{target.spec!r} made a {type(made).__name__}, which is not a module")
        made = Carrier(model, forward, made)
    trained: nn.Module = made
    return trained


def _check_own(target: Target, before: dict[int, torch.Size], trained: nn.Module) -> None:
    """Raises UsageError where it trains other parameters than the model's, or pieces of them."""
    after = {id(p): p.shape for p in _parameters(trained)}
    if any(after.get(key) != shape for key, shape in before.items()):
        raise UsageError(
            f"{target.spec!r} trains other parameters than those of the module that it was given: "
            "if they are pieces of them, as in FSDP, give --as sharded-module; copies are not the "
            "module that was to be trained"
        )


def _parameters(made: nn.Module) -> Iterable[nn.Parameter]:
    found = list(made.parameters())
    return found or [
        p for module in made.modules() for p in module._parameters.values() if p is not None
    ]


class Carrier(nn.Module):
    """Carries a wrapper that is not a module: its forward, its parameters or the model's."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], made: Any) -> None:
        super().__init__()
        self.carried = model
        self._forward, self._made = forward, made
        for name in ("no_sync", "set_requires_gradient_sync"):  # which the loop asks for
            if callable(method := getattr(made, name, None)):
                setattr(self, name, method)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The wrapper's own, where it has such a method."""
        own = getattr(self._made, "parameters", None)
        return iter(own()) if callable(own) else super().parameters(recurse)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The wrapper's."""
        return self._forward(*inputs, **named)
