"""A function of model and optimizer that returns an engine: DeepSpeed, accelerate, Fabric, ...

The loop trains a module and steps an optimizer, so an engine is given to it as both. Where an
engine keeps parameters, gradients or state elsewhere than in the model, they are asked of it: by
`full_parameters()`, `full_gradients()` and `full_state()`, or by DeepSpeed's own functions. What
such a function does not return, or returns None for, is not recorded, and what is not recorded
makes no pass.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, Build, LossOf, Step
from distcheck.errors import UsageError
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import not_installed
from distcheck.training.optimizers import OptimizerProxy, innermost
from distcheck.training.recorder import OfItsOwn

_NEEDED = ("backward", "step")
Tensors = Mapping[str, torch.Tensor | None]


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


class Engine:
    """One engine, with the model that it was given and the optimizer that the workload built."""

    def __init__(
        self, made: Any, model: nn.Module, built: torch.optim.Optimizer, what: str
    ) -> None:
        engine = made[0] if isinstance(made, tuple | list) and made else made
        missing = [name for name in _NEEDED if not callable(getattr(engine, name, None))]
        missing += [] if callable(engine) else ["__call__"]
        if missing:
            raise UsageError(
                f"{what} returned a {type(engine).__name__} without {', '.join(missing)}; expected "
                "is an engine with engine(inputs), engine.backward(loss) and engine.step(), or a "
                "tuple that begins with one"
            )
        self.engine, self.model, self.built, self._what = engine, model, built, what

    @property
    def optimizer(self) -> Any:
        """The engine's own, if it shows one; else the one that it was given."""
        shown = getattr(self.engine, "optimizer", None)
        return self.built if shown is None else shown

    def clip(self, max_norm: float) -> None:
        """By the engine's own `clip(max_norm)`, if it has one."""
        clip = getattr(self.engine, "clip", None)
        if callable(clip):
            clip(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def zero_grad(self) -> None:
        """By the engine's own, if it has one."""
        zero_grad = getattr(self.engine, "zero_grad", None) or self.optimizer.zero_grad
        zero_grad()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The engine's own, if it has one: a context in which backward exchanges nothing."""
        no_sync = getattr(self.engine, "no_sync", None)
        with no_sync() if callable(no_sync) else contextlib.nullcontext():
            yield

    def full(self, accessor: str) -> Tensors | None:
        """What an accessor gives, see `recorder.Full`. A collective on every rank."""
        read = getattr(self.engine, accessor, None)
        if not callable(read):
            if not type(self.engine).__module__.startswith("deepspeed."):
                return None
            read = _of_deepspeed(accessor, self.engine, self.model, self.built)
        tensors = read()
        if tensors is None:
            return {}
        if not isinstance(tensors, Mapping):
            raise UsageError(
                f"{self._what}: {accessor}() of its engine returned a {type(tensors).__name__}; "
                "expected is a mapping of the model's names to tensors"
            )
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return OfItsOwn(known) if isinstance(tensors, OfItsOwn) else known


class EngineModule(nn.Module):
    """The module that the loop trains: forward is the engine's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.carried = model
        self._engine: list[Engine] = []  # not a module of this one

    def take(self, engine: Engine) -> None:
        """The engine, once it is made."""
        self._engine[:] = [engine]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The engine's; the model's own before there is one."""
        called = self._engine[0].engine if self._engine else self.carried
        return called(*inputs, **named)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """The engine's."""
        return self._engine[0].no_sync()


class EngineOptimizer(OptimizerProxy):
    """The optimizer that the loop steps: its step is the engine's."""

    def __init__(self, engine: Engine) -> None:
        inner = innermost(engine.optimizer)
        self.optim = inner if isinstance(inner, torch.optim.Optimizer) else engine.built
        super().__init__(self.optim)
        self._engine = engine

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's."""
        self._engine.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """The engine's."""
        self._engine.engine.step()


def _of_deepspeed(
    accessor: str, engine: Any, model: nn.Module, built: torch.optim.Optimizer
) -> Callable[[], Tensors]:
    """DeepSpeed's functions for what its ZeRO optimizers hold in pieces."""
    from deepspeed.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )

    named = dict(model.named_parameters())
    in_pieces = engine.zero_optimization_stage() > 0  # else each rank has all by itself

    def parameters() -> Tensors:
        if not in_pieces:
            return OfItsOwn({name: p.detach() for name, p in named.items()})
        return {name: _shaped(safe_get_full_fp32_param(p), p) for name, p in named.items()}

    def gradients() -> Tensors:
        if not in_pieces:
            return OfItsOwn({name: p.grad for name, p in named.items()})
        return {name: _shaped(safe_get_full_grad(p), p) for name, p in named.items()}

    def state() -> Tensors:
        keys = {key for held in built.state.values() for key in held}
        pairs = [(f"{name}/{key}", p, key) for name, p in named.items() for key in keys]
        if not in_pieces:
            return OfItsOwn({name: built.state[p].get(key) for name, p, key in pairs})
        return {n: _shaped(safe_get_full_optimizer_state(p, key), p) for n, p, key in pairs}

    return {"full_parameters": parameters, "full_gradients": gradients, "full_state": state}[
        accessor
    ]


def _shaped(whole: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
    """In the shape of the whole parameter, which ZeRO-3 has taken away from it."""
    if whole is None:
        return None
    return whole.detach().view(getattr(parameter, "ds_shape", parameter.shape))
