"""A function of model and optimizer that returns an engine: DeepSpeed, accelerate, Fabric, ..."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, Build, LossOf, Step
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.engines import Engine, EngineModule, EngineOptimizer
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import not_installed

# Variables by which libraries are asked not to reach for the network.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def fits(target: Target) -> bool:
    """A function called `initialize` that takes a model and an optimizer."""
    return not target.is_class and target.name == "initialize" and len(_taken(target)) == 2


def _taken(target: Target) -> list[str]:
    """Its parameters for the model and for the optimizer, where it has both."""
    by_meaning = {meaning_of(p.name): p.name for p in target.parameters}
    return [by_meaning[m] for m in ("model", "optimizer") if m in by_meaning]


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called once, before the first step; the engine trains in place of model and optimizer."""
    taken = _taken(target)
    if len(taken) != 2 or not callable(target.value):
        raise refusal(
            target, f"strategy {target.spec!r} is not a function of a model and an optimizer"
        )
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    what = f"strategy {target.spec!r}"
    filling = Filling(scene, target.value, what=what, supplied=taken)
    made: list[Engine] = []
    modules: list[EngineModule] = []

    def wrap(model: nn.Module) -> nn.Module:
        modules.append(EngineModule(model))
        return modules[-1]

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        model = modules[-1].carried
        built = build(model.parameters())
        try:
            answer = filling.call(model, built)
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None
        made.append(Engine(answer, model, built, what))
        modules[-1].take(made[-1])
        return EngineOptimizer(made[-1])

    def backward(loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        scene.step = step
        loss = loss_of(batch)
        made[-1].engine.backward(loss)
        return loss.detach()

    return target.loaded(
        f"{target.name} makes the engine; its backward() and step() are called",
        wrap=wrap,
        optimizer=optimizer,
        backward=backward,
        clip=lambda model, max_norm: made[-1].clip(max_norm),
        full=lambda accessor: made[-1].full(accessor),
        engine=True,
    ).promising(declines=("resume",))
