"""A function of model and optimizer that returns an engine: DeepSpeed, Accelerate, Fabric, ...

The loop trains a module and steps an optimizer, so the engine takes the place of both. An engine
that keeps parameters, gradients or state outside the model provides them through
`full_parameters()`, `full_gradients()` and `full_state()`, or DeepSpeed's functions. A missing or
None value is not recorded, and an unrecorded value cannot pass.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distcheck.contract import Batch, Build, LossOf, Step
from distcheck.errors import UsageError
from distcheck.training.adapters.forms.wrapper import ModuleAroundWrapper
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy
from distcheck.training.loading import missing_package_error
from distcheck.training.optimizers import OptimizerProxy, innermost_optimizer
from distcheck.training.recorder import CompleteOnEachRank

_NEEDED = ("backward", "step")
Tensors = Mapping[str, torch.Tensor | None]


# Variables that keep libraries off the network.
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def fits(target: Target) -> bool:
    """Return True for a function `initialize` that takes a model and an optimizer."""
    return (
        not target.is_class and target.name == "initialize" and len(_parameter_names(target)) == 2
    )


def _parameter_names(target: Target) -> list[str]:
    """Return the names of its parameters for the model and the optimizer, if it has them."""
    by_meaning = {meaning_of(p.name): p.name for p in target.parameters}
    return [by_meaning[m] for m in ("model", "optimizer") if m in by_meaning]


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that calls the function once, before the first step. Raises UsageError."""
    taken = _parameter_names(target)
    if len(taken) != 2 or not callable(target.value):
        raise refusal_error(
            target, f"strategy {target.spec!r} is not a function of a model and an optimizer"
        )
    for name in _OFFLINE:
        os.environ.setdefault(name, "1")
    what = f"strategy {target.spec!r}"
    filling = Filling(scene, target.value, what=what, supplied=taken)
    made: list[Engine] = []
    modules: list[ModuleAroundWrapper] = []

    def wrap(model: nn.Module) -> nn.Module:
        modules.append(
            ModuleAroundWrapper(model, lambda *inputs, **named: called()(*inputs, **named), None)
        )
        return modules[-1]

    def called() -> Any:
        """Return the engine; the model before there is one."""
        return made[-1].engine if made else modules[-1].carried

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> Any:
        model = modules[-1].carried
        built = build(model.parameters())
        try:
            answer = filling.call(model, built)
        except ModuleNotFoundError as error:
            raise missing_package_error(error) or error from None
        made.append(Engine(answer, model, built, what))
        modules[-1].no_sync = made[-1].no_sync  # type: ignore[assignment]
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
    ).with_contract(declines=("resume",))


class Engine:
    """One engine, with its model and the optimizer that the workload built."""

    def __init__(
        self, made: Any, model: nn.Module, built: torch.optim.Optimizer, what: str
    ) -> None:
        engine = made[0] if isinstance(made, tuple | list) and made else made
        missing = [name for name in _NEEDED if not callable(getattr(engine, name, None))]
        missing += [] if callable(engine) else ["__call__"]
        if missing:
            raise UsageError(
                f"{what} returned a {type(engine).__name__} without {', '.join(missing)}; "
                "expected an engine with engine(inputs), engine.backward(loss) and "
                "engine.step(), or a "
                "tuple that begins with one"
            )
        self.engine, self.model, self.built, self._what = engine, model, built, what

    @property
    def optimizer(self) -> Any:
        """The optimizer that the engine exposes, or else the optimizer passed to it."""
        shown = getattr(self.engine, "optimizer", None)
        return self.built if shown is None else shown

    def clip(self, max_norm: float) -> None:
        """Clip by the engine's `clip(max_norm)`, or else by torch's clip_grad_norm_."""
        clip = getattr(self.engine, "clip", None)
        if callable(clip):
            clip(max_norm)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def zero_grad(self) -> None:
        """Clear gradients by the engine's method, if it has one."""
        zero_grad = getattr(self.engine, "zero_grad", None) or self.optimizer.zero_grad
        zero_grad()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Enter the engine's context without gradient synchronization, if it has one."""
        no_sync = getattr(self.engine, "no_sync", None)
        with no_sync() if callable(no_sync) else contextlib.nullcontext():
            yield

    def full(self, accessor: str) -> Tensors | None:
        """Return the tensors of an accessor, see `recorder.Full`. A collective on every rank."""
        read = getattr(self.engine, accessor, None)
        if not callable(read):
            if not type(self.engine).__module__.startswith("deepspeed."):
                return None
            read = _deepspeed_accessor(accessor, self.engine, self.model, self.built)
        tensors = read()
        if tensors is None:
            return {}
        if not isinstance(tensors, Mapping):
            raise UsageError(
                f"{self._what}: {accessor}() of its engine returned a {type(tensors).__name__}; "
                "expected a mapping from the model's names to tensors"
            )
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return CompleteOnEachRank(known) if isinstance(tensors, CompleteOnEachRank) else known


class EngineOptimizer(OptimizerProxy):
    """The optimizer that the loop steps. Its methods call the engine."""

    def __init__(self, engine: Engine) -> None:
        inner = innermost_optimizer(engine.optimizer)
        self.optim = inner if isinstance(inner, torch.optim.Optimizer) else engine.built
        super().__init__(self.optim)
        self._engine = engine

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self._engine.engine.step()


def _deepspeed_accessor(
    accessor: str, engine: Any, model: nn.Module, built: torch.optim.Optimizer
) -> Callable[[], Tensors]:
    from deepspeed.utils import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
    )

    named = dict(model.named_parameters())
    in_pieces = engine.zero_optimization_stage() > 0  # otherwise every rank holds all of them

    def parameters() -> Tensors:
        if not in_pieces:
            return CompleteOnEachRank({name: p.detach() for name, p in named.items()})
        return {name: _to_full_shape(safe_get_full_fp32_param(p), p) for name, p in named.items()}

    def gradients() -> Tensors:
        if not in_pieces:
            return CompleteOnEachRank({name: p.grad for name, p in named.items()})
        return {name: _to_full_shape(safe_get_full_grad(p), p) for name, p in named.items()}

    def state() -> Tensors:
        keys = {key for held in built.state.values() for key in held}
        pairs = [(f"{name}/{key}", p, key) for name, p in named.items() for key in keys]
        if not in_pieces:
            return CompleteOnEachRank({name: built.state[p].get(key) for name, p, key in pairs})
        return {n: _to_full_shape(safe_get_full_optimizer_state(p, key), p) for n, p, key in pairs}

    return {"full_parameters": parameters, "full_gradients": gradients, "full_state": state}[
        accessor
    ]


def _to_full_shape(whole: torch.Tensor | None, parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a tensor in the shape of the full parameter, which ZeRO-3 has resized."""
    if whole is None:
        return None
    return whole.detach().view(getattr(parameter, "ds_shape", parameter.shape))
