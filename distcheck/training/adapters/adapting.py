"""From an object to a strategy: which form it has, what is filled in, and that it was called."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import nn

from distcheck.contract import CONTRACT_ATTRIBUTE, Build, Step
from distcheck.errors import UsageError
from distcheck.training import scripts
from distcheck.training.adapters import choose_form, load_form
from distcheck.training.adapters.free_names import FreeNames, Reached
from distcheck.training.adapters.methods import own_names, usual_method
from distcheck.training.adapters.names import MEANINGS
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import function_of
from distcheck.training.adapters.start_up import StartUp
from distcheck.training.adapters.target import Target, named_parameters
from distcheck.training.definitions import source_line
from distcheck.training.loaded import LoadedStrategy

# Forms that need a forward or backward pass, or a piece of the parameters, on every rank.
_COMPUTING = (
    "wrapper", "hooks", "comm-hook", "sharded-module", "sharded-optimizer", "context",
    "engine",
)  # fmt: skip


def adapt(target: Target, find: Callable[[str], Any]) -> LoadedStrategy:
    """The strategy, by the form that was asked for or chosen. Raises UsageError."""
    _refuse_deferred(target)
    scene = Scene(target.adaptation, find)
    free = FreeNames(target, scene)
    scene.uses = set(free.filled.values())
    free.publish()
    start_up = StartUp(target, scene)
    target = _bound(target, scene)
    asked = target.adaptation.form
    name = asked or choose_form(target)
    if not name and (method := target.adaptation.finish or usual_method(target.value)):
        return adapt(_method_of(target, method), find)
    if not name and not callable(target.value) and not own_names(type(target.value)):
        raise UsageError(
            f"strategy {target.spec!r} is an object of type {type(target.value).__name__}; give a "
            "function, a class, or an object with a method to call after backward"
        )
    if not name:
        raise refusal(
            target,
            f"strategy {target.spec!r} is the class {target.signature}; expected is a function "
            "f(model), or a class with a method to call after backward, by a usual name or as the "
            f"only one ({_methods(target.value)})"
            if target.is_class
            else f"strategy {target.spec!r} has several methods, none with a usual name "
            f"({_methods(target.value)}); give --finish METHOD",
        )
    if target.adaptation.without_data and name in _COMPUTING:
        raise UsageError(
            f"--without-data is for code that is called after backward; {target.spec!r} was taken "
            f"as {name}, which works in a backward that a rank without data never runs (--as says "
            "otherwise)"
        )
    loaded = load_form(name).adapt(target, scene)
    line = source_line(target.value, file=loaded.file)
    loaded = dataclasses.replace(loaded, line=line or source_line(target.owner, file=loaded.file))
    if name == "strategy":
        _refuse_options(target)
        return loaded
    _check_used(target, scene, name)
    declared = hasattr(target.value, CONTRACT_ATTRIBUTE)
    said = _with_generators(loaded.note, scene)
    more = (_of_script(target), start_up.note)
    note = "" if declared and asked is None else _note(said, name, asked, free, *more)
    contract = loaded.contract
    if contract.backend is None and _speaks_mpi(target, scene):
        contract = msgspec.structs.replace(contract, backend="mpi")
    return _watched(
        dataclasses.replace(loaded, contract=contract, note=note),
        scene,
        free,
        start_up,
        target,
    )


def _of_script(target: Target) -> str:
    line = getattr(target.module, scripts.ONLY_DEFINED, 0)
    if not line:
        return ""
    file = target.spec.partition(":")[0]
    return f"{file} trains when it is imported (line {line}), so only its definitions were run"


def _method_of(target: Target, method: str) -> Target:
    """The method of a class or an object that is to be called after backward."""
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
    return f"it has {', '.join(own_names(kind)) or 'no public method'}"


def _refuse_deferred(target: Target) -> None:
    """A call of it would make an object and exchange nothing, which is not a missing exchange."""
    kinds = {
        "a coroutine": inspect.iscoroutinefunction,
        "a generator": inspect.isgeneratorfunction,
        "an asynchronous generator": inspect.isasyncgenfunction,
    }
    for kind, has_it in kinds.items():
        if has_it(target.value):
            raise UsageError(
                f"strategy {target.spec!r} is {kind}, and calling it runs nothing; give a "
                "function that runs it to its end, for example with asyncio.run"
            )


def _with_generators(note: str, scene: Scene) -> str:
    """What is said of the form, and of what can be gone through once."""
    for name in dict.fromkeys(scene.handed_once):
        named = "named_" if MEANINGS.get(name) == "named_parameters" else ""
        note += (
            f"; {name} is model.{named}parameters(), a generator "
            f"(--arg {name}=@{named}param_list gives a list)"
        )
    return note.removeprefix("; ")


def _note(note: str, name: str, asked: str | None, free: FreeNames, *more: str) -> str:
    """What a report says of the form; nothing for f(model), which can be nothing else."""
    filled = ", ".join(f"{n} (the {m.replace('_', ' ')})" for n, m in free.filled.items())
    if not note and not filled and asked is None:
        return "; ".join(filter(None, more))
    parts = [f"taken as: {name}", note] if note else [f"taken as: {name}"]
    text = ", ".join(parts)
    text += f"; filled in in its module: {filled}" if filled else ""
    text = text if asked else f"{text} (--as says otherwise)"
    return "; ".join(filter(None, [text, *more]))


def _bound(target: Target, scene: Scene) -> Target:
    """A method of a class that can be made from what is known, as a method of such an object."""
    owner = target.owner
    if owner is None or not target.is_unbound or issubclass(owner, nn.Module):
        return target
    if inspect.isabstract(owner):  # no object can be made of it
        return target
    if hasattr(target.value, CONTRACT_ATTRIBUTE) or target.adaptation.form in ("method", "wrapper"):
        return target
    required = [p for p in named_parameters(owner) if p.default is p.empty]
    static = (
        "rank",
        "local_rank",
        "world_size",
        "group",
        "communicator",
        "backend",
        "device",
        "timer",
    )
    told = {name for name, _ in target.adaptation.arguments}
    if any(scene.meaning_of(p.name) not in static and p.name not in told for p in required):
        return target
    if any(name.startswith("self.") for name in told):
        return target
    making = Filling(scene, owner, what=f"strategy {target.spec!r}")
    method = target.value
    made: list[Any] = []

    @functools.wraps(method)
    def later(*handed: Any, **named: Any) -> Any:
        """Makes the object in the rank, when it is called first: MPI is there only then."""
        if not made:
            made.append(making.call())
        return method(made[0], *handed, **named)

    signature = inspect.signature(method)
    own = list(signature.parameters.values())[1:]
    later.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    scene.uses |= {scene.meaning_of(p.name) for p in required}
    return dataclasses.replace(target, value=later, owner=None, maker=owner)


def _refuse_options(target: Target) -> None:
    said = target.adaptation
    for option, value in (
        ("--arg", said.arguments),
        ("--finish", said.finish),
        ("--reset", said.reset),
    ):
        if value:
            raise UsageError(
                f"{option} does not apply to {target.spec!r}, which has distcheck's own methods; "
                "remove it"
            )


def _check_used(target: Target, scene: Scene, name: str) -> None:
    """Raises UsageError for an option that nothing has come of."""
    unused = [n for n, _ in target.adaptation.arguments if n not in scene.used]
    if unused:
        taken = ", ".join(p.name for p in target.parameters) or "nothing"
        raise UsageError(
            f"--arg {unused[0]}: {target.signature} takes no {unused[0]!r}; it takes {taken}"
        )
    for option, value in (
        ("--finish", target.adaptation.finish),
        ("--reset", target.adaptation.reset),
    ):
        if value and name != "wrapper":
            raise UsageError(
                f"{option} {value} is for a wrapper; {target.spec!r} was taken as {name} (--as "
                "wrapper says otherwise)"
            )


def _speaks_mpi(target: Target, scene: Scene) -> bool:
    """Whether it is handed a communicator, holds one, or exchanges by one of its module."""
    asked_for = {target.source.meaning_of(p.name) for p in target.parameters} | scene.uses
    if "communicator" in asked_for:
        return True
    if target.owner is None and inspect.ismethod(target.value):
        held = (
            vars(target.value.__self__).values()
            if hasattr(target.value.__self__, "__dict__")
            else ()
        )
        if any(type(value).__module__.startswith("mpi4py") for value in held):
            return True
    if target.module is None:
        return False
    reached = Reached(function_of(target.value), target.module)
    known = vars(target.module)
    values = [known[name] for name in reached.read if name in known]
    if not any(
        str(getattr(value, "__name__", "")).startswith("mpi4py")
        or type(value).__module__.startswith("mpi4py")
        for value in values
    ):
        return False
    # One that has torch.distributed as well may ask MPI for a rank alone, or for a logger.
    exchanges = any(source.exchanges_by_mpi for source in reached.sources)
    return exchanges or not any(value is torch.distributed for value in values)


def _watched(
    loaded: LoadedStrategy, scene: Scene, free: FreeNames, start_up: StartUp, target: Target
) -> LoadedStrategy:
    """The same, with the scene kept up to date, and an error where nothing was ever called."""

    def wrap(model: nn.Module) -> nn.Module:
        scene.begin(model)
        free.publish()
        start_up.run()
        return loaded.wrap(model)

    def optimizer(build: Build, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = loaded.optimizer(build, parameters)
        scene.optimizer = made
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
                f"{target.spec!r} was never called, so nothing was verified; name its form with "
                "--as"
            )

    return dataclasses.replace(
        loaded, wrap=wrap, optimizer=optimizer, scale_loss=scale_loss, sync=sync, close=close
    )
