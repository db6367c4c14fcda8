"""A function of the list of gradients: in place, returning the list of the new ones, or writing
them to a second list.
"""

import torch
from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.training.adapters import names
from distcheck.training.adapters.gradients import present, take_back, wait_for
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 61
EXAMPLE = "f(grads), a list of tensors, in place or returning a list; f(grad_in, grad_out)"


def fits(target: Target) -> bool:
    """A function whose first parameter is a list of gradients."""
    is_function = callable(target.value) and not target.is_class
    return is_function and target.kind_of_first == "gradients"


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward with the gradients that there are."""
    if not target.first or target.is_class:
        raise refusal(target, f"strategy {target.spec!r} takes no list of gradients")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    into = [p.name for p in target.required[1:] if p.name in names.GRADIENTS_OUT][:1]
    filling = Filling(scene, target.value, what=what, supplied=[target.first, *into])

    def sync(model: nn.Module, step: Step) -> None:
        parameters = present(scene.parameters())
        tensors = [parameter.grad for parameter in parameters]
        means = [[torch.zeros_like(parameter) for parameter in parameters] for _ in into]
        answer = wait_for(filling.call(tensors, *means))
        if means:  # whatever it returns beside them
            (answer,) = means
        # What it returned; otherwise the list that it was given, whose entries it may replace.
        take_back(parameters, tensors if answer is None else answer, what=repr(target.spec))

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note=f"{target.signature} of the list of gradients, called after backward",
    )
