"""A loss that exchanges by itself: features in, one number out, with the ranks' samples in it.

Such code gathers features, labels or sums over the ranks, so that a step is that of one process
with all samples. It is trained over a table of features (`workloads/features.py`), and distcheck
averages gradients as DistributedDataParallel does: of the features, and of the loss's own weights.
The reference gives the same loss all samples, in a group of one rank.

What the loss is given follows from its parameters: labels by their name, and one view of the
samples for each other parameter without a default.
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
    """Only if asked for: a function of two tensors may be many things."""
    return False


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Every gradient is averaged over the ranks after backward."""

    def sync(model: nn.Module, step: Step) -> None:
        scene.calls += 1
        _average(model)

    called = f"{target.name}({', '.join(Made(target, scene, 'forward').given)})"
    said = ", a loss that communicates by itself; gradients are averaged over the ranks, as in DDP"
    return in_a_mesh(target.loaded(f"{called}{said}", sync=sync))


def workload(target: Target, scene: Scene) -> Workload:
    """The table, trained under this loss."""
    made = Made(target, scene, "forward")
    return Workload(made.make, made.given)


def in_a_mesh(loaded: LoadedStrategy) -> LoadedStrategy:
    """The same, judged by the whole batch alone: no rank's gradient is a part of the mean."""
    return loaded.promising(parallel=(("data", -1),), sync="out-of-sight")


def _average(model: nn.Module) -> None:
    """The mean of every gradient over the ranks; zero counts where a rank has none."""
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
    """The code's object, and what its `method` is given: "labels", or "features" of one view more.

    `make` gives a new object of a class, of a function that is called with nothing, or a copy of an
    object; a function of samples is the object itself. Raises UsageError.
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
    """Parameters without a default, and labels with one, that no --arg sets."""
    free = [p for p in named_parameters(function) if p.name not in target.arguments]
    needed = {p.name for p in required(free)}
    return [p.name for p in free if p.name in needed or p.name in _LABELS]
