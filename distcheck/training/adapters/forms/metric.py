"""A metric that communicates itself: an object with `update` and `compute`.

Each rank updates it with its own samples, in chunks of different sizes, and computes. Every rank's
result must equal that of one process with all samples. A metric is cleared by its `reset` before
each step if it has one, and recreated otherwise.
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
    """Return False: the form must be requested."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy without work after backward: the metric has communicated already."""
    taken = ", ".join(_made(target, scene).given)

    def sync(model: nn.Module, step: Step) -> None:
        scene.calls += 1

    said = f"{target.name}, a metric with update({taken}) and compute()"
    return in_a_mesh(target.loaded(said, sync=sync))


def workload(target: Target, scene: Scene) -> Measuring:
    """Return the table of features, measured by this metric."""
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
