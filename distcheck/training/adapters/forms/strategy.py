"""An object with distcheck's own methods: wrap, optimizer, backward, scale_loss, sync, close."""

from distcheck.training.adapters.methods import as_strategy, has_methods
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 0
EXAMPLE = "an object or class with wrap(model), backward(), sync() or scale_loss()"


def fits(target: Target) -> bool:
    """An object that has one of them, or a class that needs no arguments and has."""
    return has_methods(target) and not (target.is_class and target.required)


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Its methods as they are."""
    if not has_methods(target):
        raise refusal(
            target, f"strategy {target.spec!r} has none of wrap, backward, sync and scale_loss"
        )
    return as_strategy(target)
