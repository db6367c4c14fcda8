"""A collective of one tensor that leaves the mean: in place, (send, recv), or returning it."""

from distcheck.training.adapters.collectives import adapt_collective
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 62
EXAMPLE = "f(tensor), f(send, recv) or tensor = f(tensor), which leaves the mean"


def fits(target: Target) -> bool:
    """A function whose first parameter is one tensor."""
    return callable(target.value) and not target.is_class and target.kind_of_first == "tensor"


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Applied to every gradient."""
    return adapt_collective(target, scene, divide=False)
