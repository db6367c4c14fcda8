"""A class that shards the optimizer state (ZeRO-1). It takes parameters and an optimizer class,
wraps an optimizer, or is derived from torch's. In the last two cases it synchronizes gradients.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Build, Step
from distcheck.errors import UsageError
from distcheck.training.adapters.answers import with_gradient
from distcheck.training.adapters.forms import own_optimizer
from distcheck.training.adapters.forms.optimizer import WrappedOptimizer, optimizer_name
from distcheck.training.adapters.forms.optimizer import adapt as adapt_optimizer
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import COLLECTIVES, SENDS_PARAMETERS
from distcheck.training.adapters.target import (
    Target,
    annotation_text,
    named_parameters,
    parameter_meaning,
    public_method_names,
    required_parameters,
    sources_of,
    takes_any,
)
from distcheck.training.loaded import LoadedStrategy

_CLASSES = ("optimizer_cls", "optimizer_class", "optim_cls", "optim_class", "optimizer_type")


def fits(target: Target) -> bool:
    """Return True for a class whose constructor takes an optimizer class."""
    return target.is_class and bool(_class_name(target))


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that constructs the class with the workload's optimizer class and settings.
    If it leaves averaging to its caller, distcheck first all-reduces the gradients. Raises
    UsageError.
    """
    name = _class_name(target) if target.is_class else ""
    is_around = not name and not own_optimizer.fits(target) and target.is_class
    if target.adaptation.finish or target.adaptation.reset:
        if not is_around:
            raise UsageError("--finish and --reset are for a class around an optimizer")
        # With a method for it, only the owner of a parameter has its gradient.
        return _with_sharded_state(adapt_optimizer(target, scene), gradients="owner")
    if not name and own_optimizer.fits(target):
        return _with_sharded_state(
            own_optimizer.adapt(target, scene, is_divided=True), gradients="owner"
        )
    if is_around and optimizer_name(target):
        return _with_sharded_state(adapt_optimizer(target, scene))
    if not name:
        raise refusal_error(
            target, f"strategy {target.spec!r} takes neither an optimizer nor its class"
        )
    known = {p.name for p in target.parameters}
    takes_all = takes_any(target.value, "VAR_KEYWORD")
    scene.used |= {argument for argument in target.arguments if argument in known or takes_all}
    first = next(p for p in target.parameters if p.name != name)
    takes_groups, sends = parameter_meaning(target.value, first) == "groups", _sender(target.value)

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        listed = list(parameters)
        inner = build(listed)
        # Some defaults of an optimizer are not arguments (AdamW's decoupled_weight_decay).
        taken = {p.name for p in named_parameters(type(inner))} - target.arguments.keys()
        taken = taken if takes_all else taken & known
        settings = {key: value for key, value in inner.defaults.items() if key in taken}
        build_it = functools.partial(target.value, **settings)
        filling = Filling(scene, build_it, what=target.described, supplied=[first.name, name])
        made = filling.call([{"params": listed}] if takes_groups else listed, type(inner))
        held = [v for v in vars(made).values() if isinstance(v, torch.optim.Optimizer)]
        if len(held) > 1:
            raise UsageError(f"{target.spec!r} holds several optimizers, but only one is compared")
        if sends:
            step, send = made.step, getattr(made, sends)
            made.step = lambda: (step(), send())
        return WrappedOptimizer(made, held[0] if held else made, scene, has_groups=False)

    def sync(model: nn.Module, step: Step) -> None:
        for parameter in with_gradient(scene.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(step.weight)
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(step.world_size)

    return target.loaded(
        f"{target.name} in place of the optimizer, with sharded state; distcheck averages the "
        "gradients" + f"; {sends}() is called after its step" * bool(sends),
        optimizer=optimizer,
        sync=sync,
    ).with_contract(optimizer_state="sharded", one_group=True)


def _sender(kind: type) -> str:
    """Return the only method that sends parameters, if step() sends nothing; empty otherwise."""
    own = {
        n: set[str]().union(*(s.words for s in sources_of(kind, n)))
        for n in public_method_names(kind)
    }
    free = [n for n in own if not required_parameters(named_parameters(getattr(kind, n), skip=1))]
    found = [n for n in free if own[n] & SENDS_PARAMETERS]
    is_idle = "step" in own and not own["step"] & COLLECTIVES
    return found[0] if is_idle and len(found) == 1 else ""


def _with_sharded_state(loaded: LoadedStrategy, **promised: Any) -> LoadedStrategy:
    """Return the strategy with each part of the state on one rank, and further properties."""
    note = f"{loaded.note}, with sharded state"
    return loaded.with_contract(note=note, optimizer_state="sharded", **promised)


def _class_name(target: Target) -> str:
    """Return the parameter that takes an optimizer class; empty if there is none."""
    for p in named_parameters(target.value):
        text = annotation_text(p)
        if p.name in _CLASSES or ("ype[" in text and "Optimizer" in text):
            return p.name
    return ""
