"""A function that synchronises and then calls optimizer.step() itself."""

import inspect

from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.training.adapters.gradients import wait_for
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 50
EXAMPLE = "f(model, optimizer), which calls optimizer.step() after it has synchronised"


def fits(target: Target) -> bool:
    """A function that takes an optimizer and calls its step, or has another of its module do so."""
    if target.is_class or not callable(target.value):
        return False
    known = vars(target.module) if target.module is not None else {}
    called = [known[name] for name in target.source.words if inspect.isfunction(known.get(name))]
    sources = [target.source, *map(Source, called)]
    return any(
        "step" in source.attributes_of(p.name)
        for source in sources
        for p in target.parameters
        if p.name in ("optimizer", "optim", "opt", "optimiser")
    )


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called in place of the optimizer's step, whose beginning shows the final gradients."""
    if target.is_class or not callable(target.value):
        raise refusal(target, f"strategy {target.spec!r} is not a function")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    first = target.first
    supplied = [first] if first and scene.meaning_of(first) in ("", "model") else []
    filling = Filling(scene, target.value, what=what, supplied=supplied)

    def sync(model: nn.Module, step: Step) -> None:
        wait_for(filling.call(*([model] if supplied else [])))

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        update="sync",
        note=f"{target.signature}, which takes the optimizer's step as well",
    )
