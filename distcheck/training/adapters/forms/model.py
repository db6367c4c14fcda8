"""A function of the model, or of whatever else it asks for by its usual name."""

import inspect
from typing import Any

from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters.after_backward import AfterBackward, returned
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, counts
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 90
EXAMPLE = "f(model), f(model, world_size, group, ...), called after backward"


def fits(target: Target) -> bool:
    """Any function or callable object that no other form has claimed."""
    return callable(target.value) and not target.is_class and not target.is_unbound


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward, with the model as its first argument if nothing tells other."""
    if not callable(target.value) or target.is_class:
        raise refusal(target, f"strategy {target.spec!r} is not a function")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    takes_all = _takes_all(target)
    if not target.parameters and not takes_all and not scene.uses & {"model", "optimizer"}:
        raise refusal(target, f"{what}, which takes neither a model nor gradients")
    stepped = [p.name for p in target.parameters[1:2] if p.name == "step" and not counts(p)]
    subject = _subject(target, scene)
    filling = Filling(scene, target.value, what=what, supplied=[*subject, *stepped])
    after = AfterBackward(scene, repr(target.spec))

    def call(model: nn.Module, step: Step) -> Any:
        if not takes_all:
            handed = [model] if subject else []
            return filling.call(*handed, *([step] if stepped else []))
        scene.calls += 1
        return target.value(model, step)

    def sync(model: nn.Module, step: Step) -> None:
        answer = after.run(lambda: call(model, step))
        if isinstance(answer, nn.Module) and answer not in (model, scene.model):
            raise UsageError(
                f"{target.spec!r} returned another module when it was called after backward; if it "
                "wraps the model once, give --as wrapper"
            )

    said = returned(target)
    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note="" if _is_plain(target) else f"{target.signature}, called after backward{said}",
    )


def _is_plain(target: Target) -> bool:
    """Whether it is f(model) or f(model, step), which need no remark."""
    if target.adaptation.arguments or target.source.returns_many:
        return False
    return len(target.required) <= 1 and target.kind_of_first in ("model", "")


def _takes_all(target: Target) -> bool:
    """Whether it is f(*arguments), which gets the model and the step."""
    try:
        found = inspect.signature(target.value).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_POSITIONAL for p in found) and not target.required


def _subject(target: Target, scene: Scene) -> list[str]:
    """The parameter that takes the model: the first, unless its name says something else."""
    first = target.first
    told = {name for name, _ in target.adaptation.arguments}
    if not first or first in told:
        return []
    meaning = scene.meaning_of(first)
    return [first] if meaning in ("", "model") else []
