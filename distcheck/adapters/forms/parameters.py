"""A function of the list of parameters, whose gradients it changes."""

from torch import nn

from distcheck.adapters.gradients import Stillness, wait_for
from distcheck.adapters.refusals import refusal
from distcheck.adapters.scene import Filling, Scene
from distcheck.adapters.target import Target
from distcheck.contract import Step, contract_of
from distcheck.loading import LoadedStrategy, source_file

PRECEDENCE = 60
EXAMPLE = "f(params), which works on every p.grad"


def fits(target: Target) -> bool:
    """A function whose first parameter is a list of parameters."""
    return callable(target.value) and target.kind_of_first == "parameters"


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward with `list(model.parameters())`."""
    if not target.first:
        raise refusal(target, f"strategy {target.spec!r} takes no list of parameters")
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    filling = Filling(scene, target.value, what=what, supplied=[target.first])
    first = True

    def sync(model: nn.Module, step: Step) -> None:
        nonlocal first
        still = Stillness(scene.live_model) if first else None
        first = False
        wait_for(filling.call(scene.parameters()))
        if still is not None:
            still.check(repr(target.spec))

    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.value),
        sync=sync,
        note=f"{target.signature} of the list of parameters, called after backward",
    )
