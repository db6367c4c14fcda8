"""A function of the list of gradients, in place or returning the list of the new ones."""

from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.training.adapters.gradients import present, take_back, wait_for
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loading import LoadedStrategy, source_file

PRECEDENCE = 61
EXAMPLE = "f(grads), a list of tensors, in place or returning a list"


def fits(target: Target) -> bool:
    """A function whose first parameter is a list of gradients."""
    is_function = callable(target.value) and not target.is_class
    return is_function and target.kind_of_first == "gradients"


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward with the gradients that there are."""
    if not target.first or target.is_class:
        raise refusal(target, f"strategy {target.spec!r} takes no list of gradients")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    filling = Filling(scene, target.value, what=what, supplied=[target.first])

    def sync(model: nn.Module, step: Step) -> None:
        parameters = present(scene.parameters())
        tensors = [parameter.grad for parameter in parameters]
        answer = wait_for(filling.call(tensors))
        # What it returned; otherwise the list that it was given, whose entries it may replace.
        take_back(parameters, tensors if answer is None else answer, what=repr(target.spec))

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note=f"{target.signature} of the list of gradients, called after backward",
    )
