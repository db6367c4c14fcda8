"""A loss that communicates itself: it takes features and returns one number over all ranks'
samples.

Such code gathers features, labels or sums over the ranks, so that a step equals that of one process
with all samples. It is trained on a table of features (`workloads/features.py`), and distcheck
averages gradients as DistributedDataParallel does: of the features, and of the loss's own weights.
The reference passes all samples to the same loss, in a group of one rank.

The loss's arguments follow from its parameters: labels by their name, and one view of the samples
for each other parameter without a default.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, named_parameters, required
from distcheck.training.loaded import LoadedStrategy
from distcheck.workloads.features import Workload

_LABELS = {"labels", "label", "target", "targets", "y", "y_true", "classes", "ids", "groups"}


def fits(target: Target) -> bool:
    """Return False: a function of two tensors can be anything, so the form must be requested."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that averages every gradient over the ranks after backward."""

    def sync(model: nn.Module, step: Step) -> None:
        scene.calls += 1
        _average(model)

    called = f"{target.name}({', '.join(Made(target, scene, 'forward').given)})"
    said = ", a loss that communicates by itself; gradients are averaged over the ranks, as in DDP"
    return in_a_mesh(target.loaded(f"{called}{said}", sync=sync))


def workload(target: Target, scene: Scene) -> Workload:
    """Return the table of features, trained under this loss."""
    made = Made(target, scene, "forward")
    return Workload(made.make, made.given)


def in_a_mesh(loaded: LoadedStrategy) -> LoadedStrategy:
    """Return the strategy judged by the full batch only: no rank's gradient is a term."""
    return loaded.promising(parallel=(("data", -1),), sync="out-of-sight")


def _average(model: nn.Module) -> None:
    """Average every gradient over the ranks; a rank without one contributes zero."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        has = torch.tensor(float(parameter.grad is not None), device=parameter.device)
        dist.all_reduce(has)
        if not has:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Made:
    """The code's object, and the arguments of its `method`: "labels", or "features" for a view.

    `make` returns a new object of a class or of a function without arguments, a copy of an object,
    or a function of samples itself. Raises UsageError.
    """

    def __init__(self, target: Target, scene: Scene, method: str) -> None:
        value, what = target.value, f"strategy {target.spec!r}"
        self.make: Callable[[], Any]
        if inspect.isroutine(value) and target.required:
            names = _handed(value, target)
            filling = Filling(scene, value, what=target.described, supplied=names)
            self.make = lambda: lambda **given: filling.call(*(given[name] for name in names))
        else:
            is_maker = target.is_class or inspect.isroutine(value)
            maker = Filling(scene, value, what=what) if is_maker else None
            self.make = maker.call if maker else lambda: copy.deepcopy(value)
            made = self.make()
            names = _handed(getattr(made, method, made), target)
        if not names:
            raise refusal(target, f"{what} takes no samples: {target.signature}")
        self.given = {name: "labels" if name in _LABELS else "features" for name in names}


def _handed(function: Any, target: Target) -> list[str]:
    """Return the parameters without a default, and labels with one, that no --arg sets."""
    free = [p for p in named_parameters(function) if p.name not in target.arguments]
    needed = {p.name for p in required(free)}
    return [p.name for p in free if p.name in needed or p.name in _LABELS]
