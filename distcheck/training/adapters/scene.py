"""The values that can be filled in by the names that code uses: the rank, the world size, the
model.

A scene is created when the code is loaded, in a rank or in the process that inspects it before any
rank exists. Model, optimizer and step are added during training.
"""

import ast
import contextlib
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.records import Adaptation
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import (
    is_annotated_number,
    is_single_process_default,
    named_parameters,
    takes_any,
    wants_list,
)
from distcheck.training.adapters.unknown import (
    UnknownArgumentsError,
    UnknownAttributeError,
    raise_if_stand_in_rejected,
    suggested_options,
)
from distcheck.training.adapters.values import (
    argument_for_class,
    candidate_values,
    class_for_argument,
)


@dataclass
class Scene:
    """Values by meaning (see `names.py`), and the options for individual names."""

    adaptation: Adaptation
    find: Callable[[str], Any]  # resolves `@module:object`
    model: nn.Module | None = None
    optimizer: Any = None
    make_optimizer: Callable[[nn.Module], Any] | None = None  # before the loop does
    step: Step | None = None
    closure: Callable[[], torch.Tensor] | None = None  # returns the loss, as code requests it
    rate: float | None = None  # a learning rate that replaces the optimizer's
    calls: int = 0
    used: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)  # meanings that are supplied in another way
    # Parameters that receive a generator, each with the value of --arg for a list.
    handed_once: dict[str, str] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)  # parameters, with assumed values
    _kept: dict[str, Any] = field(default_factory=dict)  # by name, objects created from options
    _namespace: SimpleNamespace | None = None
    _reads: dict[str, Callable[..., Any]] = field(default_factory=dict)  # of args, and the reader
    _looked_at: list[type] = field(default_factory=list)  # classes that may be made

    @property
    def current_model(self) -> nn.Module:
        """The model. Raises UsageError if the code requests the model before training."""
        if self.model is None:
            raise UsageError("the code requests the model before it exists")
        return self.model

    def begin(self, model: nn.Module) -> None:
        """Set the model to train, which also determines the device."""
        self.model = model
        assigned = {name.partition(".")[2] for name, _ in self.adaptation.arguments}
        if self._namespace is not None and "device" not in assigned:
            self._namespace.device = self.value("device")

    def parameters(self) -> list[nn.Parameter]:
        return list(self.current_model.parameters())

    def value(self, meaning: str) -> Any:
        """Return the current value of a meaning. Raises UsageError if it does not exist yet."""
        if meaning in ("model", "optimizer", "step", "closure"):
            return self._live(meaning)
        makers: dict[str, Callable[[], Any]] = {
            "rank": dist.get_rank,
            "local_rank": _local_rank,
            "world_size": dist.get_world_size,
            "group": lambda: dist.group.WORLD,
            "device": self._device,
            "backend": dist.get_backend,
            "index": lambda: self._live("step").index,
            "epoch": lambda: 0,
            "arguments": self._arguments,
            "communicator": _communicator,
            "distributed": lambda: dist,
            "sum": lambda: dist.ReduceOp.SUM,
            "rate": lambda: self.rate or self._live("optimizer").param_groups[0]["lr"],
            "samples": lambda: self._live("step").samples,
            "tokens": lambda: self._live("step").tokens,
            "root": lambda: 0,
            "timer": lambda: lambda *_, **__: contextlib.nullcontext(),
            # Smaller than DDP's, so that a small model fills more than one.
            "bucket_mb": lambda: 1,
            "bucket_bytes": lambda: 1 << 20,
            "parameters": lambda: self.current_model.parameters(),
            "listed_parameters": self.parameters,
            "named_parameters": lambda: self.current_model.named_parameters(),
            "listed_named_parameters": lambda: list(self.current_model.named_parameters()),
            "gradients": lambda: [p.grad for p in self.parameters() if p.grad is not None],
            "groups": lambda: self._live("optimizer").param_groups,
        }
        return makers[meaning]()

    def note_namespace(self) -> None:
        """Mark options `--arg args.name=value` as used."""
        heads = [name for name, _ in self.adaptation.arguments if "." in name]
        self.used.update(name for name in heads if not name.startswith("self."))

    def note_attribute_reads(self, name: str, function: Callable[..., Any]) -> None:
        """Record the command-line attributes that a function reads, to list all missing ones."""
        self._reads |= dict.fromkeys(sorted(Source(function).attributes_of(name)), function)

    def read(self, text: str) -> Any:
        """Return the value of an `--arg` or `--set` option: a literal, `@name`, or `@module:object`
        (for a class, an object constructed with the arguments that it requests).
        """
        if not text.startswith("@"):
            return ast.literal_eval(text)
        name = text[1:]
        if ":" not in name:
            return self.value(self._check_meaning(name))
        named = self.find(name)
        return Filling(self, named, what=name).call() if inspect.isclass(named) else named

    def argument_for_object(
        self, parameter: inspect.Parameter, function: Callable[..., Any]
    ) -> str:
        """Return the value of `--arg` that creates the object for a parameter, from a class of the
        code's author that needs no unknown arguments. Empty if there is no such class.
        """
        kind = class_for_argument(parameter, function)
        if kind is None or kind in self._looked_at:
            return ""
        once, assumed = dict(self.handed_once), list(self.assumed)
        self._looked_at.append(kind)
        try:
            Filling(self, kind, what=kind.__name__)
        except UsageError:
            self.assumed = assumed
            return ""
        finally:
            self.handed_once = once
            self._looked_at.pop()
        return argument_for_class(kind)

    def keep(self, name: str, text: str) -> Any:
        """Return the value of an option, created once per name: it may hold state."""
        if text.startswith("@") and ":" not in text:
            return self.read(text)
        if name not in self._kept:
            self._kept[name] = self.read(text)
        return self._kept[name]

    def check(self, text: str) -> None:
        """Raise UsageError for an `@name` without a meaning."""
        if text.startswith("@") and ":" not in text:
            self._check_meaning(text[1:])

    def _check_meaning(self, name: str) -> str:
        meaning = meaning_of(name)
        if not meaning:
            known = "rank, world_size, group, device, model, optimizer, step, iteration, args, comm"
            raise UsageError(f"@{name} is unknown; known are {known} and similar names")
        return meaning

    def _live(self, what: str) -> Any:
        value = getattr(self, what)
        if what == "optimizer" and value is None and self.model and self.make_optimizer:
            self.optimizer = value = self.make_optimizer(self.model)
        if value is None:
            raise UsageError(f"the code requests the {what} before it exists")
        return value

    def _device(self) -> torch.device:
        if self.model is None:
            return torch.device("cpu")
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _arguments(self) -> SimpleNamespace:
        """Return a typical parsed command line, extended by `--arg args.name=value`. There is one
        for all calls, because the code may keep state in it.
        """
        if self._namespace is not None:
            self._update(self._namespace)
            return self._namespace
        rank, size = self.value("rank"), self.value("world_size")
        facts = {"rank": rank, "local_rank": self.value("local_rank"), "gpu": rank}
        if torch.cuda.is_initialized():
            facts["gpu"] = torch.cuda.current_device()
        facts |= {"world_size": size, "size": size, "nprocs": size, "num_nodes": size}
        facts |= {"distributed": True, "backend": self.value("backend")}
        facts |= {"device": self.value("device"), "process_group": self.value("group")}
        for name, text in self.adaptation.arguments:
            head, dot, rest = name.partition(".")
            if dot and meaning_of(head) == "arguments":
                facts[rest] = self.read(text)
                self.used.add(name)
        self._namespace = _Arguments(self._reads, facts)
        return self._namespace

    def _update(self, namespace: SimpleNamespace) -> None:
        """Update the values that change in every step."""
        for name, text in self.adaptation.arguments:
            head, dot, rest = name.partition(".")
            stands_for_it = text.startswith("@") and ":" not in text
            if dot and stands_for_it and meaning_of(head) == "arguments":
                setattr(namespace, rest, self.read(text))


class Filling:
    """The parameters of one callable, each with the source of its value.

    supplied   parameters that the caller passes at every call
    made_from  the parameter among them that the caller creates from `--arg`
    also       parameters to fill in although they have a default; constructors' `world_size=1` and
               `rank=0` always are

    Raises UsageError for a parameter of unknown meaning.
    """

    def __init__(
        self,
        scene: Scene,
        function: Callable[..., Any],
        *,
        what: str,
        supplied: Sequence[str] = (),
        skip: int = 0,
        made_from: str = "",
        also: Sequence[str] = (),
    ) -> None:
        self._scene, self._function, self._supplied = scene, function, tuple(supplied)
        self._sources: list[tuple[inspect.Parameter, str, str]] = []
        assigned = dict(scene.adaptation.arguments)
        unknown = list[inspect.Parameter]()
        parameters = named_parameters(function, skip=skip)
        for p in parameters:
            if p.name in supplied and p.name in assigned and p.name != made_from:
                raise UsageError(
                    f"--arg {p.name}: {what}, whose {p.name} is what it is called with"
                )
            if p.name in supplied:
                self._sources.append((p, "supplied", p.name))
            elif p.name in assigned:
                scene.check(assigned[p.name])
                scene.used.add(p.name)
                self._sources.append((p, "assigned", assigned[p.name]))
            elif inspect.isclass(function) and is_single_process_default(p):
                scene.assumed.append(f"{p.name}=@{p.name}")
                self._sources.append((p, "meaning", meaning_of(p.name)))
            elif p.default is p.empty or p.name in also:
                how, source = self._source_of_value(p)
                if how:
                    self._sources.append((p, how, source))
                else:
                    unknown.append(p)
        if unknown:
            listed = [p.name for p in unknown]
            raise UnknownArgumentsError(
                f"{what}: unknown parameters {', '.join(listed)}; pass "
                f"{suggested_options('--arg', listed, function)}",
                {p.name: candidate_values(p, function) for p in unknown},
            )
        known = {p.name for p in parameters}
        more = assigned.items() if takes_any(function, "VAR_KEYWORD") else ()
        self._more = {n: t for n, t in more if n not in known and "." not in n}
        scene.used.update(self._more)

    def _source_of_value(self, parameter: inspect.Parameter) -> tuple[str, str]:
        """The source of a parameter's value: the meaning of its name or use, or an object of the
        class that it asks for; empty texts if nothing is known of it.
        """
        scene, function = self._scene, self._function
        meaning = Source(function).meaning_of(parameter.name)
        if not meaning:
            text = scene.argument_for_object(parameter, function)
            scene.assumed += [f"{parameter.name}={text}"] * bool(text)
            return "assigned" * bool(text), text
        meaning = self._refine_meaning(meaning, parameter)
        if meaning.startswith("bucket_"):
            scene.assumed.append(f"{parameter.name}={scene.value(meaning)}")
        if meaning == "arguments":
            scene.note_namespace()
            scene.note_attribute_reads(parameter.name, function)
        return "meaning", meaning

    def _refine_meaning(self, meaning: str, parameter: inspect.Parameter) -> str:
        if meaning == "step" and is_annotated_number(parameter):
            return "index"
        if meaning in ("parameters", "named_parameters"):
            if wants_list(parameter, Source(self._function)):
                return f"listed_{meaning}"
            list_of = "@named_param_list" if meaning == "named_parameters" else "@param_list"
            self._scene.handed_once[parameter.name] = list_of
        return meaning

    def call(self, *handed: Any) -> Any:
        """Make the call; `handed` are the values of `supplied`, in the same order."""
        values = dict(zip(self._supplied, handed, strict=True))
        positional, keywords = [], {}
        for parameter, how, source in self._sources:
            if how == "supplied":
                value = values[source]
            elif how == "assigned":
                value = self._read(parameter.name, source)
            else:
                value = self._scene.value(source)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                keywords[parameter.name] = value
        keywords |= {name: self._read(name, text) for name, text in self._more.items()}
        self._scene.calls += 1
        try:
            return self._function(*positional, **keywords)
        except TypeError as error:
            raise_if_stand_in_rejected(error)
            raise

    def _read(self, name: str, text: str) -> Any:
        """Return the value of an option; for a constructor, a new one."""
        is_made = inspect.isclass(self._function)
        return self._scene.read(text) if is_made else self._scene.keep(name, text)


class _Arguments(SimpleNamespace):
    """A parsed command line; a missing attribute raises an error that lists all."""

    def __init__(self, reads: dict[str, Callable[..., Any]], facts: dict[str, Any]) -> None:
        super().__init__(**facts)
        object.__setattr__(self, "_reads", reads)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reads = object.__getattribute__(self, "_reads")
        lacking = [name, *(other for other in reads if other not in {name, *vars(self)})]
        names = [f"args.{one}" for one in lacking]
        raise UnknownAttributeError(
            f"the code reads {', '.join(names)}, which distcheck does not know; pass "
            f"{suggested_options('--arg', names, reads.get(name))}"
        )


def _local_rank() -> int:
    """Return the value of --local_rank: the index of the GPU, or else the rank, which is the same
    in every run. The variable LOCAL_RANK differs between a run and its rerun, to expose code that
    takes it for the rank; an argument must not differ.
    """
    return int(os.environ["LOCAL_RANK"]) if torch.cuda.is_initialized() else dist.get_rank()


def _communicator() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD
