"""The code that is to be adapted, and what is known of it without calling it."""

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
    Reached,
    Source,
    decorated,
    function_of,
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
    """An object that a person named, the class that it was reached through, and its module. `maker`
    is the class whose object a method is of that is to be made.
    """

    spec: str
    value: Any
    owner: type | None
    module: ModuleType | None
    adaptation: Adaptation = field(default_factory=Adaptation)
    maker: type | None = None

    @property
    def is_class(self) -> bool:
        """Whether it is a class, to be made an object of."""
        return inspect.isclass(self.value)

    @property
    def is_function(self) -> bool:
        """Whether it can be called as it is."""
        return callable(self.value) and not self.is_class

    @property
    def is_unbound(self) -> bool:
        """Whether it is a method that lacks its object."""
        if self.owner is None or not inspect.isfunction(self.value):
            return False
        return not isinstance(inspect.getattr_static(self.owner, self.name, None), staticmethod)

    @property
    def name(self) -> str:
        """What it calls itself."""
        value = decorated(self.value) or self.value
        return str(getattr(value, "__name__", type(value).__name__))

    @cached_property
    def parameters(self) -> Parameters:
        """What it takes by name, without a method's `self`."""
        return named_parameters(self.value, skip=int(self.is_unbound))

    @property
    def arguments(self) -> dict[str, str]:
        """What `--arg` says, by name."""
        return dict(self.adaptation.arguments)

    @property
    def required(self) -> Parameters:
        """Parameters without a default for which `--arg` gives no value."""
        return [p for p in required(self.parameters) if p.name not in self.arguments]

    @property
    def first(self) -> str:
        """The parameter that is worked on: the first that is to be filled, or the first of all,
        unless it is something else (a rank, a group, a command line, a module), by its name or its
        use, and what is worked on comes later.
        """
        taken = [p.name for p in (self.required or self.parameters)]
        if not taken or not self._is_a_fact(taken[0]):
            return taken[0] if taken else ""
        others = [name for name in taken if not self._is_a_fact(name)]
        known = [name for name in others if name in names.SUBJECTS or self.source.use_of(name)]
        return next(iter(known or others), taken[0])

    def _is_a_fact(self, name: str) -> bool:
        """Whether a parameter is a fact of the world or a setting, which code does not work on."""
        use = self.source.use_of(name)
        if use:
            return use not in ("model", "optimizer")
        return name in names.MEANINGS and (name in names.WORLD or name not in names.SUBJECTS)

    @property
    def first_annotation(self) -> str:
        """How the first parameter is annotated, as text; empty where it is not."""
        return next((annotation(p) for p in self.parameters if p.name == self.first), "")

    @cached_property
    def source(self) -> Source:
        """What its source says."""
        return Source(self.value)

    @property
    def signature(self) -> str:
        """As a person wrote it, without annotations and without defaults that are no literals."""
        try:
            shown = inspect.signature(decorated(self.value) or self.value)
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
        """How messages begin that are about its parameters."""
        return f"strategy {self.spec!r} has the signature {self.signature}"

    def loaded(self, note: str, **methods: Any) -> LoadedStrategy:
        """A strategy with these methods, and the contract and file of the code."""
        return LoadedStrategy(
            contract=contract_of(self.value), file=source_file(self.value), note=note, **methods
        )

    @cached_property
    def reached(self) -> list[Source]:
        """What its source says, and that of all that it reaches in its module."""
        if self.module is None or self.value is None:
            return [self.source]
        return Reached(function_of(self.value), self.module).sources

    @property
    def everything(self) -> list[Source]:
        """The same, and the source of the class that it is a method of."""
        if self.owner is None or self.module is None:
            return self.reached
        return Reached(self.owner, self.module).sources

    @property
    def words(self) -> set[str]:
        """Every name in its source, and in that of all that it reaches in its module."""
        return set[str]().union(*(source.words | source.attributes for source in self.reached))

    @cached_property
    def kind_of_first(self) -> str:
        """What the first parameter is: `model`, `models`, `parameters`, `gradients`, `tensor`,
        `optimizer`, or empty where nothing tells. Its use in the source outweighs its annotation,
        that its name.
        """
        kind = self.known_kind or self._named_kind()
        if kind in ("parameters", "gradients"):
            return "parameters" if "grad" in self.source.attributes else kind
        return kind

    @property
    def known_kind(self) -> str:
        """The same, without what is only a name."""
        use = self.source.use_of(self.first)
        if use in ("model", "optimizer"):
            return use
        return self.source.worked_on(self.first) or self._annotated_kind()

    def _annotated_kind(self) -> str:
        text = self.first_annotation
        if not text:
            return ""
        listed = any(word in text for word in ("ist[", "terable", "terator", "equence", "uple["))
        if listed:
            return "parameters" if "Param" in text else "gradients" if "Tensor" in text else ""
        for word, kind in (
            ("Module", "model"),
            ("Optimizer", "optimizer"),
            ("Tensor", "tensor"),
            ("ndarray", "tensor"),
        ):
            if word in text:
                return kind
        return ""

    def _named_kind(self) -> str:
        for known, kind in (
            (names.MODELS, "model"),
            (names.OPTIMIZERS, "optimizer"),
            (names.PARAMETERS, "parameters"),
            (names.GRADIENTS | names.GRADIENTS_IN, "gradients"),
            (names.TENSORS, "tensor"),
        ):
            if self.first in known:
                return kind
        return ""


def wants_list(parameter: inspect.Parameter, source: Source) -> bool:
    """Whether a parameter that takes parameters needs a list: by its name, its annotation, or by
    what is done with it. The others get what people hand over, `model.parameters()`.
    """
    text = str(parameter.annotation)
    by_type = any(word in text for word in ("ist[", "list", "List", "equence", "uple"))
    return parameter.name in names.LISTED_PARAMETERS or by_type or source.indexes(parameter.name)


def counts(parameter: inspect.Parameter) -> bool:
    """Whether it takes a number, as in `step: int`."""
    return parameter.annotation in (int, "int")


def annotation(parameter: inspect.Parameter) -> str:
    """How a parameter is annotated, as text; empty where it is not."""
    text = parameter.annotation
    if text is parameter.empty:
        return ""
    return text if isinstance(text, str) else inspect.formatannotation(text)


def _signed(value: Callable[..., Any]) -> Parameters | None:
    """All that a callable takes; None where that cannot be known."""
    try:
        return list(inspect.signature(decorated(value) or value).parameters.values())
    except (TypeError, ValueError):
        return None


def named_parameters(value: Callable[..., Any], *, skip: int = 0) -> Parameters:
    """What a callable takes by name; nothing where that cannot be known."""
    return [p for p in (_signed(value) or [])[skip:] if p.kind in _NAMED]


def required(parameters: Parameters) -> Parameters:
    """Those without a default."""
    return [p for p in parameters if p.default is p.empty]


def is_of_one_process(parameter: inspect.Parameter) -> bool:
    """Return True if its default describes a run of one process, as in `world_size=1, rank=0`."""
    name, default = parameter.name, parameter.default
    known = names.OF_ONE_PROCESS.get(names.meaning_of(name))
    return type(default) is int and default == known and name not in names.AMBIGUOUS


def takes_any_name(value: Callable[..., Any]) -> bool:
    """Whether a callable has `**kwargs`."""
    signed = _signed(value)
    return signed is None or any(p.kind is p.VAR_KEYWORD for p in signed)


def takes_any_number(value: Callable[..., Any]) -> bool:
    """Whether a callable has `*args`."""
    signed = _signed(value)
    return signed is None or any(p.kind is p.VAR_POSITIONAL for p in signed)


def own_classes(build: Any) -> list[Any]:
    """A class, and those that it is derived from and that are not torch's; a function itself."""
    bases = build.__mro__ if inspect.isclass(build) else (build,)
    return [base for base in bases if not base.__module__.startswith(("torch", "builtins"))]


def own_names(build: type) -> list[str]:
    """Public methods that neither torch nor object has given it, in the order of definition."""
    kept = [
        (name, getattr(value, "__func__", value))  # of static and class methods, what is run
        for base in own_classes(build)
        for name, value in vars(base).items()
    ]
    functions = dict.fromkeys(name for name, value in kept if inspect.isfunction(value))
    return [n for n in functions if not n.startswith("_") and callable(getattr(build, n))]


def written(kind: Any) -> list[str]:
    """The functions of a class that are its author's."""
    classes = own_classes(kind) if inspect.isclass(kind) else []
    found = (name for base in classes for name, v in vars(base).items() if inspect.isfunction(v))
    return list(dict.fromkeys(found))


def sources_of(kind: type, name: str) -> list[Source]:
    """The sources of a method, of those that it calls on itself, and of what these extend."""
    members, found, waiting = written(kind), dict[str, list[Source]](), [name]
    while waiting:
        called = waiting.pop()
        defined = [vars(base)[called] for base in own_classes(kind) if called in vars(base)]
        found[called] = sources = [Source(one) for one in defined]
        if sources and "super" not in sources[0].words:
            del sources[1:]
        used = set[str]().union(*(source.attributes_of("self") for source in sources))
        waiting += [n for n in members if n in used and n not in {*found, *waiting}]
    return [source for sources in found.values() for source in sources]


def begins_once(kind: Any, *, takes: str) -> str:
    """Return the method that a training calls once on a new object: it registers hooks, which the
    constructor does not, or, without reducing anything, sets attributes that other methods read; or
    it has a usual name. `takes` is what it is given: `model` (or its parameters), or nothing.
    Empty if several fit.
    """
    own = {name: sources_of(kind, name) for name in written(kind)}
    if any(source.registers_hooks for source in own.pop("__init__", ())):
        return ""
    hooked, fitting = list[str](), list[str]()
    for name in own.keys() - {"__call__", "forward", "backward", *names.FINISH, *names.RESET}:
        uses = [source for other in own if other != name for source in own[other]]
        read = set[str]().union(*(source.attributes_of("self") for source in uses))
        given = {n for s in own[name] for n in s.changed_of("self")}
        works = set[str]().union(*(source.words for source in own[name])) & _WORKS
        taken = required(named_parameters(getattr(kind, name), skip=1))
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
    """The file of an object; empty where that is not known."""
    try:
        return inspect.getsourcefile(_inspectable(value)) or ""
    except TypeError:
        return ""


def source_line(value: Any, *, file: str) -> int:
    """The line of `file` where an object's definition begins; 0 where that is not known, or where
    it was defined in another file.
    """
    try:
        inspectable = _inspectable(value)
        if inspect.getsourcefile(inspectable) != file:
            return 0
        # As getsourcelines() has it, which would also look for the last line.
        return inspect.findsource(inspect.unwrap(inspectable))[1] + 1
    except (TypeError, OSError):
        return 0


def _inspectable(value: Any) -> Any:
    """The function or class itself; of an object its class."""
    value = inspect.unwrap(value) if callable(value) else value
    return value if inspect.isroutine(value) or inspect.isclass(value) else type(value)


def bound_later(method: Callable[..., Any], make: Callable[[], Any]) -> Callable[..., Any]:
    """A method as a function without `self`, whose object is made in the rank, when it is called
    first.
    """
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
