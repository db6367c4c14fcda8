"""A metric that exchanges by itself: an object with `update` and `compute`.

Each rank updates it with its own samples, in stretches of unlike sizes, and computes. What every
rank gets must be what one process computes of all samples. A metric is cleared by its `reset`
before each step where it has one, and made anew where it has none.
"""

from torch import nn

from distcheck.contract import Step
from distcheck.training.adapters.forms.loss import Made, in_a_mesh
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy
from distcheck.workloads.features import Measuring


def fits(target: Target) -> bool:
    """Only if asked for."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Nothing is done after backward: the metric has exchanged already."""
    taken = ", ".join(_made(target, scene).given)

    def sync(model: nn.Module, step: Step) -> None:
        scene.calls += 1

    said = f"{target.name}, a metric with update({taken}) and compute()"
    return in_a_mesh(target.loaded(said, sync=sync))


def workload(target: Target, scene: Scene) -> Measuring:
    """The table, measured by this metric."""
    made = _made(target, scene)
    given = made.given
    if len(given) == 1:
        given = {name: "values" for name, role in given.items() if role != "labels"} or given
    return Measuring(made.make, given)


def _made(target: Target, scene: Scene) -> Made:
    made = Made(target, scene, "update")
    if not all(hasattr(made.make(), name) for name in ("update", "compute")):
        raise refusal(target, f"strategy {target.spec!r} has no update() and compute()")
    return made
