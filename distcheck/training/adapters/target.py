"""The code to adapt, and its properties that are known without a call."""

import ast
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

from distcheck.contract import contract_of
from distcheck.records import Adaptation
from distcheck.training.adapters import names
from distcheck.training.adapters.source import (
    COLLECTIVES,
    ReachedCode,
    Source,
    called_function,
    decorated_function,
)
from distcheck.training.loaded import LoadedStrategy

Parameters = list[inspect.Parameter]
_WORKS = {"grad", *COLLECTIVES} - {"broadcast", "send", "recv"}
_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True)
class Target:
    """An object that the user selected, the class through which it was selected, and its module.
    `maker` is the class to construct, if `value` is one of its methods and was bound later.
    """

    spec: str
    value: Any
    owner: type | None
    module: ModuleType | None
    adaptation: Adaptation = field(default_factory=Adaptation)
    maker: type | None = None

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.value)

    @property
    def is_function(self) -> bool:
        """Return True if the object can be called directly."""
        return callable(self.value) and not self.is_class

    @property
    def is_unbound(self) -> bool:
        """Return True if the object is a method without an instance."""
        if self.owner is None or not inspect.isfunction(self.value):
            return False
        return not isinstance(inspect.getattr_static(self.owner, self.name, None), staticmethod)

    @property
    def name(self) -> str:
        value = decorated_function(self.value) or self.value
        return str(getattr(value, "__name__", type(value).__name__))

    @cached_property
    def parameters(self) -> Parameters:
        """The named parameters, without a method's `self`."""
        return named_parameters(self.value, skip=int(self.is_unbound))

    @property
    def arguments(self) -> dict[str, str]:
        """The values of `--arg`, by name."""
        return dict(self.adaptation.arguments)

    @property
    def required(self) -> Parameters:
        """The parameters that have neither a default nor a value from `--arg`."""
        return [p for p in required_parameters(self.parameters) if p.name not in self.arguments]

    @property
    def first(self) -> str:
        """The name of the subject: the first parameter to fill in, or else the first parameter. If
        its name or use shows that it is something else (a rank, a group, a command line, a module),
        a later parameter that can be the subject is used.
        """
        taken = [p.name for p in (self.required or self.parameters)]
        if not taken or not self._is_a_fact(taken[0]):
            return taken[0] if taken else ""
        others = [name for name in taken if not self._is_a_fact(name)]
        known = [name for name in others if name in names.SUBJECTS or self.source.kind_by_use(name)]
        return next(iter(known or others), taken[0])

    def _is_a_fact(self, name: str) -> bool:
        """Return True if a parameter is a fact of the world or a setting, and not a subject."""
        use = self.source.kind_by_use(name)
        if use:
            return use not in ("model", "optimizer", "groups")
        return name in names.MEANINGS and (name in names.WORLD or name not in names.SUBJECTS)

    @property
    def first_annotation(self) -> str:
        """The annotation of the first parameter, as text; empty if there is none."""
        return next((annotation_text(p) for p in self.parameters if p.name == self.first), "")

    @cached_property
    def source(self) -> Source:
        return Source(self.value)

    @property
    def signature(self) -> str:
        """The signature, without annotations and without defaults that are not literals."""
        try:
            shown = inspect.signature(decorated_function(self.value) or self.value)
        except (TypeError, ValueError):
            return self.name
        plain = (int, float, str, bool, type(None))
        parameters = [
            p.replace(
                annotation=p.empty,
                default=p.default if p.default is p.empty or isinstance(p.default, plain) else ...,
            )
            for p in shown.parameters.values()
        ]
        return f"{self.name}{inspect.Signature(parameters)}".replace("Ellipsis", "...")

    @property
    def described(self) -> str:
        """The beginning of messages about the object's parameters."""
        return f"strategy {self.spec!r} has the signature {self.signature}"

    def loaded(self, note: str, **methods: Any) -> LoadedStrategy:
        """Return a strategy with the given methods, and with the contract and file of the code."""
        return LoadedStrategy(
            contract=contract_of(self.value), file=source_file(self.value), note=note, **methods
        )

    @cached_property
    def reached(self) -> list[Source]:
        """Return the sources of the object and of all code that it reaches in its module."""
        if self.module is None or self.value is None:
            return [self.source]
        return ReachedCode(called_function(self.value), self.module).sources

    @property
    def everything(self) -> list[Source]:
        """Return the reached sources, and the class if the object is a method."""
        if self.owner is None or self.module is None:
            return self.reached
        return ReachedCode(self.owner, self.module).sources

    @property
    def takes_closure(self) -> bool:
        """Return True if step() requires a closure, or receives one by `--arg`."""
        step: Any = getattr(self.value, "step", None) if self.is_class else None
        taken = [p for p in named_parameters(step, skip=1) if p.name == "closure"]
        return bool(required_parameters(taken) or (taken and "closure" in self.arguments))

    @property
    def needs_closure(self) -> bool:
        """Return True if step() communicates only if it receives a closure."""
        nodes = Source(getattr(self.value, "step", None)).nodes if self.is_class else ()
        tests = [n for n in nodes if isinstance(n, ast.If) and "closure" in ast.unparse(n.test)]
        words = [{ast.unparse(n).rpartition(".")[2] for n in ast.walk(test)} for test in tests]
        return not self.takes_closure and any(each & COLLECTIVES for each in words)

    @property
    def hooks_ddp(self) -> bool:
        """Return True if the code registers a communication hook on a module that it receives."""
        function = getattr(self.value, "__init__") if self.is_class else self.value  # noqa: B009
        called = Source(function).called
        is_made = any(one.endswith(("DDP", "DistributedDataParallel")) for one in called)
        held = [f"{of}{p.name}" for p in self.parameters for of in ("", "self.")]
        return not is_made and any(f"{one}.register_comm_hook" in called for one in held)

    @property
    def words(self) -> set[str]:
        """Every name in the reached sources."""
        return set[str]().union(*(source.words | source.attributes for source in self.reached))

    @cached_property
    def kind_of_first(self) -> str:
        """The kind of the subject by use, annotation or name, in this order: `model`, `models`,
        `parameters`, `gradients`, `tensor`, `optimizer`, or empty if unknown.
        """
        kind = self.kind_without_name or self._named_kind()
        if kind in ("parameters", "gradients"):
            return "parameters" if "grad" in self.source.attributes else kind
        return kind

    @property
    def kind_without_name(self) -> str:
        """The kind of the subject judged by use and annotation, without its name."""
        use = self.source.kind_by_use(self.first)
        if use in ("model", "optimizer"):
            return use
        return self.source.kind_by_elements(self.first) or self._annotated_kind()

    def _annotated_kind(self) -> str:
        text = self.first_annotation
        if not text:
            return ""
        listed = any(word in text for word in ("ist[", "terable", "terator", "equence", "uple["))
        if listed:
            return "parameters" if "Param" in text else "gradients" if "Tensor" in text else ""
        by = {"Module": "model", "Optimizer": "optimizer", "Tensor": "tensor", "ndarray": "tensor"}
        return next((kind for word, kind in by.items() if word in text), "")

    def _named_kind(self) -> str:
        known = {
            "model": names.MODELS,
            "optimizer": names.OPTIMIZERS,
            "parameters": names.PARAMETERS,
            "gradients": names.GRADIENTS | names.GRADIENTS_IN,
            "tensor": names.TENSORS,
        }
        return next((kind for kind, said in known.items() if self.first in said), "")


def wants_list(parameter: inspect.Parameter, source: Source) -> bool:
    """Return True if a parameter needs a list of parameters, judged by its name, annotation or use.
    Otherwise it receives `model.parameters()`.
    """
    text = str(parameter.annotation)
    by_type = any(word in text for word in ("ist[", "list", "List", "equence", "uple"))
    return parameter.name in names.LISTED_PARAMETERS or by_type or source.indexes(parameter.name)


def is_annotated_number(parameter: inspect.Parameter) -> bool:
    return parameter.annotation in (int, "int")


def annotation_text(parameter: inspect.Parameter) -> str:
    """Return the annotation of a parameter, as text; empty if there is none."""
    text = parameter.annotation
    if text is parameter.empty:
        return ""
    return text if isinstance(text, str) else inspect.formatannotation(text)


def _signature_parameters(value: Callable[..., Any]) -> Parameters | None:
    """Return all parameters of a callable; None if unknown. A constructor `(*args, **kwargs)` has
    those of the next one of its bases.
    """
    bases = [one for one in getattr(value, "__mro__", ()) if "__init__" in vars(one)][1:-1]
    try:
        found = list(inspect.signature(decorated_function(value) or value).parameters.values())
    except (TypeError, ValueError):
        return None
    passes_all = [p.kind.name for p in found] == ["VAR_POSITIONAL", "VAR_KEYWORD"]
    return (_signature_parameters(bases[0]) or found) if passes_all and bases else found


def named_parameters(value: Callable[..., Any], *, skip: int = 0) -> Parameters:
    """Return the named parameters of a callable; empty if unknown."""
    return [p for p in (_signature_parameters(value) or [])[skip:] if p.kind in _NAMED]


def parameter_meaning(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    """Return the meaning of a parameter from its annotation, or else from its use or name."""
    text = str(parameter.annotation)
    called = getattr(function, "__init__") if inspect.isclass(function) else function  # noqa: B009
    known = "model" if "Module" in text else "optimizer" if "Optimizer" in text else ""
    return known or Source(called).meaning_of(parameter.name)


def required_parameters(parameters: Parameters) -> Parameters:
    return [p for p in parameters if p.default is p.empty]


def is_single_process_default(parameter: inspect.Parameter) -> bool:
    """Return True if the default describes a single process, as in `world_size=1, rank=0`."""
    name, default = parameter.name, parameter.default
    known = names.OF_ONE_PROCESS.get(names.meaning_of(name))
    return type(default) is int and default == known and name not in names.AMBIGUOUS


def takes_any(value: Callable[..., Any], kind: str) -> bool:
    """Return True if a callable has parameters of a kind: VAR_POSITIONAL (`*args`), VAR_KEYWORD."""
    signed = _signature_parameters(value)
    return signed is None or any(p.kind.name == kind for p in signed)


def author_classes(build: Any) -> list[Any]:
    """Return a class and its bases, except torch's and builtin ones; return a function itself."""
    bases = build.__mro__ if inspect.isclass(build) else (build,)
    return [base for base in bases if not base.__module__.startswith(("torch", "builtins"))]


def public_method_names(build: type) -> list[str]:
    """Return the public methods not inherited from torch or object, in definition order."""
    kept = [
        (name, getattr(value, "__func__", value))  # the function of a static or class method
        for base in author_classes(build)
        for name, value in vars(base).items()
    ]
    functions = dict.fromkeys(name for name, value in kept if inspect.isfunction(value))
    return [n for n in functions if not n.startswith("_") and callable(getattr(build, n))]


def author_methods(kind: Any) -> list[str]:
    """Return the functions that the author of a class defined."""
    classes = author_classes(kind) if inspect.isclass(kind) else []
    found = (name for base in classes for name, v in vars(base).items() if inspect.isfunction(v))
    return list(dict.fromkeys(found))


def sources_of(kind: type, name: str) -> list[Source]:
    """Return the sources of a method, of methods that it calls on `self`, and of their bases."""
    members, found, waiting = author_methods(kind), dict[str, list[Source]](), [name]
    while waiting:
        called = waiting.pop()
        defined = [vars(base)[called] for base in author_classes(kind) if called in vars(base)]
        found[called] = sources = [Source(one) for one in defined]
        if sources and "super" not in sources[0].words:
            del sources[1:]
        used = set[str]().union(*(source.attributes_of("self") for source in sources))
        waiting += [n for n in members if n in used and n not in {*found, *waiting}]
    return [source for sources in found.values() for source in sources]


def name_of_start_method(kind: Any, *, takes: str) -> str:
    """Return the method that a training loop calls once on a new object.

    Such a method registers hooks that the constructor does not register, or sets attributes that
    other methods read without reducing anything, or has a common name. `takes` is its argument:
    `model` (or its parameters), or empty for none. Empty if several methods fit.
    """
    own = {name: sources_of(kind, name) for name in author_methods(kind)}
    if any(source.registers_hooks for source in own.pop("__init__", ())):
        return ""
    hooked, fitting = list[str](), list[str]()
    for name in own.keys() - {"__call__", "forward", "backward", *names.FINISH, *names.RESET}:
        uses = [source for other in own if other != name for source in own[other]]
        read = set[str]().union(*(source.attributes_of("self") for source in uses))
        given = {n for s in own[name] for n in s.changed_attributes("self")}
        works = set[str]().union(*(source.words for source in own[name])) & _WORKS
        taken = required_parameters(named_parameters(getattr(kind, name), skip=1))
        asked = {Source(getattr(kind, name)).meaning_of(p.name) for p in taken}
        of_model = any(one == "model" or one.endswith("parameters") for one in asked)
        is_right = of_model and asked <= names.BEFORE_TRAINING
        if not (is_right if takes else not taken and name[0] != "_") or name in read:
            continue
        if any(source.registers_hooks for source in own[name]):
            hooked.append(name)
        elif own[name][0].returns_something if name in names.BEGIN else takes and not works:
            fitting += [name] * bool(name in names.BEGIN or given & read)
    found = hooked or fitting
    return found[0] if len(found) == 1 else ""


def source_file(value: Any) -> str:
    """Return the source file of an object; empty if unknown."""
    try:
        return inspect.getsourcefile(_inspectable(value)) or ""
    except TypeError:
        return ""


def source_line(value: Any, *, file: str) -> int:
    """Return the line of `file` at which an object's definition begins; 0 if it is not there."""
    try:
        inspectable = _inspectable(value)
        if inspect.getsourcefile(inspectable) != file:
            return 0
        # Like getsourcelines(), which would also search the last line.
        return inspect.findsource(inspect.unwrap(inspectable))[1] + 1
    except (TypeError, OSError):
        return 0


def _inspectable(value: Any) -> Any:
    """Return a function or class itself, and the class of any other object."""
    value = inspect.unwrap(value) if callable(value) else value
    return value if inspect.isroutine(value) or inspect.isclass(value) else type(value)


def method_without_self(method: Callable[..., Any], make: Callable[[], Any]) -> Callable[..., Any]:
    """Return a method as a function without `self`. The rank constructs the object."""
    made: list[Any] = []

    @functools.wraps(method)
    def later(*handed: Any, **named: Any) -> Any:
        if not made:
            made.append(make())
        return method(made[0], *handed, **named)

    signature = inspect.signature(method)
    rest = list(signature.parameters.values())[1:]
    later.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    return later
