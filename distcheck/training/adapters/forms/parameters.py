"""A function of the list of parameters, whose gradients it changes."""

from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.training.adapters.after_backward import AfterBackward, returned
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, wants_list
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 60
EXAMPLE = "f(params), which works on every p.grad"


def fits(target: Target) -> bool:
    """A function whose first parameter is a list of parameters."""
    is_function = callable(target.value) and not target.is_class
    return is_function and target.kind_of_first == "parameters"


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward with `model.parameters()`, or with a list of them."""
    if not target.first or target.is_class:
        raise refusal(target, f"strategy {target.spec!r} takes no list of parameters")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    (parameter,) = [p for p in target.parameters if p.name == target.first]
    told = any(name == target.first for name, _ in target.adaptation.arguments)
    supplied = [] if told else [target.first]
    filling = Filling(scene, target.value, what=what, supplied=supplied)
    listed = wants_list(parameter, target.source)
    if supplied and not listed:
        scene.handed_once.append(target.first)
    after = AfterBackward(scene, repr(target.spec))

    def sync(model: nn.Module, step: Step) -> None:
        given = scene.parameters() if listed else scene.live_model.parameters()
        after.run(lambda: filling.call(*([given] if supplied else [])))

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note=f"{target.signature} of the parameters, called after backward{returned(target)}",
    )
