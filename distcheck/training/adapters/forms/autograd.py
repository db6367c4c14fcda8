"""A module around the model that averages gradients in an autograd function of the forward pass.

Parameters, or activations, pass through a function whose backward is the mean over the ranks. No
hook sees the gradients that backward computes on one rank, so these are not compared.
"""

from distcheck.training.adapters.forms import wrapper
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """Never by itself: only what it does tells it from another wrapper."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """As a wrapper whose local gradients are out of sight."""
    loaded = wrapper.adapt(target, scene)
    note = f"{loaded.note}; it averages within backward, so local gradients are not recorded"
    return loaded.promising(note=note, sync="out-of-sight")
