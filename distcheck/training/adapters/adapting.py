"""Turns an object into a strategy: selects its form, fills in arguments, checks for calls."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import nn

from distcheck.contract import CONTRACT_ATTRIBUTE, Batch, Build, LossOf, Step
from distcheck.errors import UsageError
from distcheck.records.run_facts import TAKEN_AS
from distcheck.training import scripts
from distcheck.training.adapters.called import adapt_row, call_of_method
from distcheck.training.adapters.forms import Form, choose_form, form_of
from distcheck.training.adapters.free_names import FreeNames, StartUp
from distcheck.training.adapters.hypotheses import Tiers, ways_to_call
from distcheck.training.adapters.names import FINISH, meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import ReachedCode, called_function
from distcheck.training.adapters.target import (
    Target,
    method_without_self,
    name_of_start_method,
    named_parameters,
    public_method_names,
    required_parameters,
    source_line,
    sources_of,
)
from distcheck.training.adapters.unknown import FormError
from distcheck.training.loaded import LoadedStrategy

_MOST_MODULES = 3
_NEVER_MPI = ("torch", "numpy", "distcheck")  # packages whose functions never communicate by MPI


def adapt(target: Target, find: Callable[[str], Any]) -> LoadedStrategy:
    """Return the strategy, in the form that `--as` selects or the first that fits."""
    _refuse_deferred(target)
    try:
        return _adapt(target, find)
    except FormError as error:
        for way in chain(*other_ways(target, find)):
            loaded = _adapt(dataclasses.replace(target, adaptation=way), find)
            tried = [pair for pair in way.arguments if pair not in target.adaptation.arguments]
            pin = " ".join(f"--arg {name}={value}" for name, value in tried)
            note = f"{loaded.note} (override with --as, --finish or --reset)"
            if tried:
                note = f"{loaded.note}; {pin} was tried (pin it, or pass a different value)"
            return dataclasses.replace(loaded, note=note, refusal=str(error))
        raise


def other_ways(target: Target, find: Callable[[str], Any]) -> Tiers:
    """Return the ways to call the object, except the first: see `hypotheses`."""
    return ways_to_call(
        target, lambda way: _adapt(dataclasses.replace(target, adaptation=way), find)
    )


def _adapt(target: Target, find: Callable[[str], Any]) -> LoadedStrategy:
    scene = Scene(target.adaptation, find)
    free = FreeNames(target, scene)
    scene.uses = set(free.filled.values())
    free.publish()
    start_up = StartUp(target, scene)
    target = _bound(target, scene, start_up)
    named = target.adaptation.form
    form = form_of(named) if named else choose_form(target)
    if form is None and (method := target.adaptation.finish or _usual_method(target.value)):
        return _adapt(_method_of(target, method), find)
    if form is None:
        raise _no_form(target)
    if target.adaptation.without_data and form.computes:
        raise UsageError(
            f"--without-data is for code that is called after backward; {target.spec!r} was taken "
            f"as {form.name}, which runs in a backward pass that a rank without data never "
            "executes (override with --as)"
        )
    loaded = adapt_row(form, target, scene) if form.called else form.own.adapt(target, scene)
    line = source_line(target.value, file=loaded.file)
    loaded = dataclasses.replace(loaded, line=line or source_line(target.owner, file=loaded.file))
    if form.name == "strategy":
        _refuse_options(target)
        return loaded
    loaded = _backward_in_closure(loaded, target, scene)
    _check_used(target, scene, form)
    declared = hasattr(target.value, CONTRACT_ATTRIBUTE)
    about_form = _note_on_arguments(loaded.note, scene)
    more = (_note_on_script(target), start_up.note)
    note = "" if declared and named is None else _note(about_form, form.name, named, free, *more)
    contract = loaded.contract
    if contract.backend is None and _uses_mpi(target, scene):
        contract = msgspec.structs.replace(contract, backend="mpi")
    once = tuple(scene.handed_once.items())
    loaded = dataclasses.replace(loaded, contract=contract, note=note, handed_once=once)
    if start_up.making and hasattr(target.maker, "zero_grad"):
        clears = call_of_method(scene, start_up.made, "zero_grad", target.described)
        loaded = dataclasses.replace(loaded, zero_grad=clears)
    return _check_that_called(loaded, scene, free, start_up, target)


def _no_form(target: Target) -> UsageError:
    if not callable(target.value) and not public_method_names(type(target.value)):
        return UsageError(
            f"strategy {target.spec!r} is an object of type {type(target.value).__name__}; pass "
            "a function, a class, or an object with a method to call after backward"
        )
    return refusal_error(
        target,
        f"strategy {target.spec!r} is the class {target.signature}; expected a function "
        "f(model), or a class with a method to call after backward, by a conventional name or as "
        f"the only one ({_methods(target.value)})"
        if target.is_class
        else f"strategy {target.spec!r} has several methods, none with a conventional name "
        f"({_methods(target.value)}); pass --finish METHOD",
    )


def _usual_method(value: Any) -> str:
    """Return the method to call after backward, of a class or an object other than an optimizer:
    the first with a common name, a class's `__call__`, or the only public one; of a module class,
    `forward` if it takes a model. Empty if there is none.
    """
    kind = value if inspect.isclass(value) else type(value)
    methods = public_method_names(kind)
    if inspect.isclass(value) and issubclass(value, nn.Module) and "forward" in methods:
        first = list(inspect.signature(value.forward).parameters)[1:2]
        if list(map(meaning_of, first)) == ["model"]:
            return "forward"
    if inspect.isroutine(value) or inspect.ismodule(value):
        return ""
    if issubclass(kind, nn.Module | torch.optim.Optimizer):
        return ""
    begins = name_of_start_method(value, takes="model")
    usual = next((name for name in FINISH if name in methods), "")
    if begins and not usual and "step" in methods:
        return "step"
    if begins and not usual and any(s.registers_hooks for s in sources_of(kind, begins)):
        return begins
    methods = [name for name in methods if name != begins]
    if not usual and inspect.isclass(value) and any("__call__" in vars(c) for c in kind.__mro__):
        return "__call__"
    return usual or (methods[0] if len(methods) == 1 else "")


def _note_on_script(target: Target) -> str:
    line = getattr(target.module, scripts.ONLY_DEFINED, 0)
    said = f"{target.spec.partition(':')[0]} trains when it is imported (line {line}), so only "
    return f"{said}its definitions were executed" * bool(line)


def _method_of(target: Target, method: str) -> Target:
    """Return the target for the method to call after backward. Raises UsageError."""
    if not callable(getattr(target.value, method, None)):
        raise UsageError(
            f"--finish {method}: {target.name} has no such method; {_methods(target.value)}"
        )
    return dataclasses.replace(
        target,
        spec=f"{target.spec}.{method}",
        value=getattr(target.value, method),
        owner=target.value if target.is_class else None,
        adaptation=msgspec.structs.replace(target.adaptation, finish=None),
    )


def _methods(value: Any) -> str:
    kind = value if inspect.isclass(value) else type(value)
    return f"it has {', '.join(public_method_names(kind)) or 'no public method'}"


def _refuse_deferred(target: Target) -> None:
    """Raise UsageError for a function whose call only creates a coroutine or generator: it would
    look like a missing gradient synchronization.
    """
    kinds = {
        "a coroutine": inspect.iscoroutinefunction,
        "a generator": inspect.isgeneratorfunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
    }
    for kind, has_it in kinds.items():
        if has_it(target.value):
            raise UsageError(
                f"strategy {target.spec!r} is {kind}, and calling it runs nothing; pass a "
                "function that runs it to completion, for example with asyncio.run"
            )


def _note_on_arguments(note: str, scene: Scene) -> str:
    """Return the note on the form, on arguments that are generators, and on assumptions."""
    for name, value in scene.handed_once.items():
        given = f"model.{'named_' * value.startswith('@named_')}parameters(), a generator"
        note += f"; {name} is {given} (--arg {name}={value} gives a list)"
    if scene.assumed:
        note += f"; {', '.join(dict.fromkeys(scene.assumed))} (override with --arg)"
    return note.removeprefix("; ")


def _note(note: str, form: str, named: str | None, free: FreeNames, *more: str) -> str:
    """Return the report's note on the form; empty for f(model), which is unambiguous."""
    filled = ", ".join(f"{n} (the {m.replace('_', ' ')})" for n, m in free.filled.items())
    text = ""
    if note or filled or named:
        text = ", ".join(filter(None, [f"{TAKEN_AS}{form}", note]))
        text += f"; filled in in its module: {filled}" if filled else ""
        text += "" if named else " (override with --as)"
    return "; ".join(filter(None, [text, *more]))


# Constant during training, and known before there is a model.
_FIXED = (
    "rank", "local_rank", "world_size", "group", "communicator", "backend", "device", "timer",
    "bucket_mb", "bucket_bytes",
)  # fmt: skip


def _bound(target: Target, scene: Scene, start_up: StartUp) -> Target:
    """Bind a method of a class whose constructor needs only known arguments to an object of it; an
    object with a method that sets it up for a model is created before training.
    """
    owner = target.owner
    if owner is None or not target.is_unbound:
        return target
    if issubclass(owner, nn.Module) or inspect.isabstract(owner):
        return target
    if hasattr(target.value, CONTRACT_ATTRIBUTE) or target.adaptation.form in ("method", "wrapper"):
        return target
    asks_for = {p.name: meaning_of(p.name) for p in required_parameters(named_parameters(owner))}
    assigned = target.arguments
    unknown = [n for n, meaning in asks_for.items() if meaning not in _FIXED and n not in assigned]
    if unknown or any(name.startswith("self.") for name in assigned):
        return target
    making = Filling(scene, owner, what=f"strategy {target.spec!r}")
    scene.uses |= set(asks_for.values())
    later = method_without_self(target.value, making.call)  # MPI is available only in the rank
    if (first := name_of_start_method(owner, takes="model")) not in ("", target.name):
        start_up.make(making, first, lends=target.source.steps_optimizer)
        scene.uses.add("model")
        later = method_without_self(target.value, start_up.ready)
    return dataclasses.replace(target, value=later, owner=None, maker=owner)


def _refuse_options(target: Target) -> None:
    adaptation = target.adaptation
    for option, value in (
        ("--arg", adaptation.arguments),
        ("--finish", adaptation.finish),
        ("--reset", adaptation.reset),
    ):
        if value:
            raise UsageError(
                f"{option} does not apply to {target.spec!r}, which already implements "
                "distcheck's interface; remove it"
            )


def _check_used(target: Target, scene: Scene, form: Form) -> None:
    """Raise UsageError for an option that had no effect."""
    unused = next((name for name in target.arguments if name not in scene.used), None)
    if unused is not None:
        taken = ", ".join(p.name for p in target.parameters) or "nothing"
        raise UsageError(
            f"--arg {unused}: {target.signature} takes no {unused!r}; it takes {taken}"
        )
    options = (("--finish", target.adaptation.finish), ("--reset", target.adaptation.reset))
    for option, value in options:
        if value and not form.takes_methods:
            raise UsageError(
                f"{option} {value} is for a wrapper; {target.spec!r} was taken as {form.name} "
                "(override with --as wrapper)"
            )


def _uses_mpi(target: Target, scene: Scene) -> bool:
    """Return True if it receives or holds an MPI communicator, or uses one of its module."""
    meanings = {target.source.meaning_of(p.name) for p in target.parameters} | scene.uses
    if "communicator" in meanings:
        return True
    if target.owner is None and inspect.ismethod(target.value):
        held = getattr(target.value.__self__, "__dict__", {}).values()
        if any(type(value).__module__.startswith("mpi4py") for value in held):
            return True
    return target.module is not None and _exchanges_by_mpi(
        called_function(target.value), target.module
    )


def _exchanges_by_mpi(function: Any, module: ModuleType, most: int = _MOST_MODULES) -> bool:
    """Return True if a function reaches mpi4py, through at most `most` other modules."""
    reached, known = ReachedCode(function, module), vars(module)
    values = [known[name] for name in reached.read if name in known]
    # A module with torch.distributed may use MPI only for a rank or a logger.
    has_torch = any(value is torch.distributed for value in values)
    if any(
        str(getattr(value, "__name__", "")).startswith("mpi4py")
        or type(value).__module__.startswith("mpi4py")
        for value in values
    ):
        exchanges = any(source.exchanges_by_mpi for source in reached.sources)
        if exchanges or (not has_torch and most == _MOST_MODULES):
            return True
    if has_torch or not most:
        return False
    elsewhere = [
        (value, sys.modules.get(value.__module__))
        for value in values
        if inspect.isfunction(value) and value.__module__ != module.__name__
    ]
    return any(
        _exchanges_by_mpi(value, where, most - 1)
        for value, where in elsewhere
        if where is not None and where.__name__.partition(".")[0] not in _NEVER_MPI
    )


def _backward_in_closure(loaded: LoadedStrategy, target: Target, scene: Scene) -> LoadedStrategy:
    """Return the strategy with backward in the closure that its step() requires; or in step(), if
    that runs backward itself.
    """
    if loaded.update != "optimizer" or loaded.backward or not target.takes_closure:
        return loaded
    runs_it = any("backward" in source.words for source in sources_of(target.value, "step"))
    losses: list[torch.Tensor] = []

    def backward(loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        losses.append(loss_of(batch))
        return losses[-1].detach()

    def closure() -> torch.Tensor:
        if not losses:
            raise UsageError(f"{target.spec!r} calls its closure more than once in a step")
        loss = functools.reduce(torch.add, losses)
        losses.clear()
        if not runs_it:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    scene.closure = closure
    scene.used.add("closure")
    return dataclasses.replace(loaded, backward=backward)


def _check_that_called(
    loaded: LoadedStrategy, scene: Scene, free: FreeNames, start_up: StartUp, target: Target
) -> LoadedStrategy:
    """Return the strategy with the scene kept up to date, and an error if never called."""

    def wrap(model: nn.Module) -> nn.Module:
        model = nn.parallel.DistributedDataParallel(model) if target.hooks_ddp else model
        scene.begin(model)
        free.publish()
        return loaded.wrap(start_up.run(model))

    def builds(build: Build) -> None:
        scene.optimizer = None
        if loaded.optimizer is LoadedStrategy.optimizer:
            scene.make_optimizer = lambda model: build(model.parameters())

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = scene.optimizer  # code may have asked for it before it was wrapped
        scene.optimizer = made = loaded.optimizer(build, parameters) if made is None else made
        free.publish()
        return made

    def scale_loss(loss: torch.Tensor, step: Step) -> torch.Tensor:
        scene.step = step
        free.publish()
        return loaded.scale_loss(loss, step)

    def sync(model: nn.Module, step: Step) -> None:
        scene.model, scene.step = scene.model or model, step
        loaded.sync(model, step)

    def close() -> None:
        loaded.close()
        if scene.calls == 0:
            raise UsageError(
                f"{target.spec!r} was never called, so nothing was verified; pass its form with "
                "--as"
            )

    return dataclasses.replace(
        loaded,
        builds=builds,
        wrap=wrap,
        optimizer=optimizer,
        scale_loss=scale_loss,
        sync=sync,
        close=close,
    )
