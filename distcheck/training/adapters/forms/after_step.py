"""A function that averages parameters, and so is called after the optimizer's step."""

import dataclasses

from torch import nn

from distcheck.contract import Step
from distcheck.training.adapters import load_form
from distcheck.training.adapters.free_names import Reached
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.source import function_of
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 56
EXAMPLE = "f(model), which averages parameters, called after the optimizer's step"

_VALUES = {"data", "state_dict", "parameters_to_vector"}
_COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "Allreduce"}


def fits(target: Target) -> bool:
    """A function of the model that exchanges what parameters hold, and reads no gradient."""
    if not callable(target.value) or target.is_class or target.is_unbound:
        return False
    if target.kind_of_first != "model" or target.module is None:
        return False
    reached = Reached(function_of(target.value), target.module).sources
    read = set[str]().union(*(source.attributes for source in reached))
    return "grad" not in read and bool(read & _VALUES) and bool(read & _COLLECTIVES)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Takes the step, and calls it."""
    called = load_form("model").adapt(target, scene)

    def sync(model: nn.Module, step: Step) -> None:
        scene.value("optimizer").step()
        called.sync(model, step)

    return dataclasses.replace(
        called,
        sync=sync,
        update="sync",
        note=f"{target.signature}, which exchanges parameters and no gradients, called after the "
        "optimizer's step; --accept local-sgd:PERIOD judges the average of parameters",
    )
