"""A loss that communicates: it takes features and returns one number over all ranks' samples. Or a
metric: an object with `update` and `compute`.

Such code gathers features, labels or sums over the ranks, so that a step equals that of one process
with all samples. It is trained on a table of features (`workloads/features.py`), and distcheck
averages gradients as DistributedDataParallel does: those of the features, and those of the loss's
weights. The reference passes all samples to the same loss, in a group of one rank.

The arguments follow from the parameters of the loss: labels by their name, and one view of the
samples for each remaining parameter without a default.

Each rank updates a metric with its samples, in chunks of different sizes, and computes. Every
rank's result must equal that of one process with all samples. A metric is cleared by its `reset`
before each step if it has one, and recreated otherwise.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target, named_parameters, required_parameters
from distcheck.training.loaded import LoadedStrategy
from distcheck.workloads.features import MetricWorkload, Workload

_LABELS = {"labels", "label", "target", "targets", "y", "y_true", "classes", "ids", "groups"}
_OF_A_MATRIX = {"transpose", "t", "T", "mT", "mm", "matmul", "norm"}


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that averages gradients after backward, unless it is a metric."""
    of_metric = target.adaptation.form == "metric"

    def sync(model: nn.Module, step: Step) -> None:
        scene.calls += 1
        if not of_metric:
            _average(model)

    given = ", ".join(ConstructedObject(target, scene).given)
    said = f"{target.name}({given}), a loss that communicates by itself; gradients are averaged "
    said += "over the ranks, as in DDP"
    said = f"{target.name}, a metric with update({given}) and compute()" if of_metric else said
    # No rank's gradient is a term: the full batch alone judges.
    return target.loaded(said, sync=sync).with_contract(
        parallel=(("data", -1),), sync="out-of-sight"
    )


def workload(target: Target, scene: Scene) -> Workload:
    """Return the table of features, trained under this loss or measured by this metric."""
    made = ConstructedObject(target, scene)
    if target.adaptation.form != "metric":
        return Workload(made.make, made.given)
    given = made.given
    if len(given) == 1:
        given = {name: "values" for name, role in given.items() if role != "labels"} or given
    return MetricWorkload(made.make, given)


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


class ConstructedObject:
    """The user's object, and the arguments of its method: "labels", or "features" for a view.

    `make` returns a new object of a class or of a function without arguments, a copy of an object,
    or a function of samples itself. Raises UsageError.
    """

    def __init__(self, target: Target, scene: Scene) -> None:
        method = "update" if target.adaptation.form == "metric" else "forward"
        value, what = target.value, f"strategy {target.spec!r}"
        self.make: Callable[[], Any]
        if inspect.isroutine(value) and target.required:
            names = _unset_parameters(value, target)
            filling = Filling(scene, value, what=target.described, supplied=names)
            self.make = lambda: lambda **given: filling.call(*(given[name] for name in names))
        else:
            is_maker = target.is_class or inspect.isroutine(value)
            maker = Filling(scene, value, what=what) if is_maker else None
            self.make = maker.call if maker else lambda: copy.deepcopy(value)
            made = self.make()
            names = _unset_parameters(getattr(made, method, made), target)
        if not names:
            raise refusal_error(target, f"{what} takes no samples: {target.signature}")
        needed = ("update", "compute") if method == "update" else ()
        if not all(hasattr(self.make(), name) for name in needed):
            raise refusal_error(target, f"strategy {target.spec!r} has no update() and compute()")
        reads = {n: set[str]().union(*(s.attributes_of(n) for s in target.reached)) for n in names}
        labels = {n for n in names if n in _LABELS and not reads[n] & _OF_A_MATRIX}
        self.given = {name: "labels" if name in labels else "features" for name in names}


def _unset_parameters(function: Any, target: Target) -> list[str]:
    """Return the parameters without a default, and labels with one, that no --arg sets."""
    free = [p for p in named_parameters(function) if p.name not in target.arguments]
    needed = {p.name for p in required_parameters(free)}
    return [p.name for p in free if p.name in needed or p.name in _LABELS]
