"""A module around the model that averages gradients in an autograd function of the forward pass.

Parameters, or activations, pass through a function whose backward averages over the ranks. No hook
can observe the local gradients, so these are not compared.
"""

from distcheck.training.adapters.forms import wrapper
from distcheck.training.adapters.scene import Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """Return False: only its behavior distinguishes it from other wrappers."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return the code as a wrapper whose local gradients are not observable."""
    loaded = wrapper.adapt(target, scene)
    note = f"{loaded.note}; it averages within backward, so local gradients are not recorded"
    return loaded.promising(note=note, sync="out-of-sight")
