"""A collective of one tensor that leaves the sum; distcheck divides. Only if asked for."""

from distcheck.training.adapters.collectives import adapt_collective
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 1000
EXAMPLE = "the same, which leaves the sum; distcheck divides it by the number of ranks"


def fits(target: Target) -> bool:
    """Never by itself: nothing tells a sum that the caller divides from a forgotten division."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Applied to every gradient, then divided."""
    return adapt_collective(target, scene, divide=True)
