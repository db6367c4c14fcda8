"""The code that is to be adapted, and what is known of it without calling it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

from distcheck.records import Adaptation
from distcheck.training.adapters import names
from distcheck.training.adapters.source import Source

Parameters = list[inspect.Parameter]
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
    def is_unbound(self) -> bool:
        """Whether it is a method that lacks its object."""
        return self.owner is not None and inspect.isfunction(self.value) and not self._is_static

    @property
    def _is_static(self) -> bool:
        kept = inspect.getattr_static(self.owner, self.name, None)
        return isinstance(kept, staticmethod)

    @property
    def name(self) -> str:
        """What it calls itself."""
        return str(getattr(self.value, "__name__", type(self.value).__name__))

    @cached_property
    def parameters(self) -> Parameters:
        """What it takes by name, without a method's `self`."""
        return named_parameters(self.value, skip=int(self.is_unbound))

    @property
    def required(self) -> Parameters:
        """Parameters without a default that nothing was said about."""
        told = {name for name, _ in self.adaptation.arguments}
        return [p for p in self.parameters if p.default is p.empty and p.name not in told]

    @property
    def first(self) -> str:
        """The parameter that is worked on: the first that is to be filled, or the first of all,
        unless it is something else (a rank, a group, a command line, a module), by its name or its
        use, and what is worked on comes later.
        """
        found = [p.name for p in (self.required or self.parameters)]
        if not found or not self._is_beside(found[0]):
            return found[0] if found else ""
        others = [name for name in found if not self._is_beside(name)]
        known = [name for name in others if name in names.SUBJECTS or self.source.use_of(name)]
        return next(iter(known or others), found[0])

    def _is_beside(self, name: str) -> bool:
        """Whether a parameter is a fact of the world or a setting, which code does not work on."""
        use = self.source.use_of(name)
        if use:
            return use not in ("model", "optimizer")
        return name in names.MEANINGS and (name in names.WORLD or name not in names.SUBJECTS)

    @property
    def first_annotation(self) -> str:
        """How the first parameter is annotated, as text; empty where it is not."""
        found = [p.annotation for p in self.parameters if p.name == self.first]
        if not found or found[0] is inspect.Parameter.empty:
            return ""
        return found[0] if isinstance(found[0], str) else inspect.formatannotation(found[0])

    @cached_property
    def source(self) -> Source:
        """What its source says."""
        return Source(self.value)

    @property
    def signature(self) -> str:
        """As a person wrote it, without annotations and without defaults that are no literals."""
        try:
            found = list(inspect.signature(self.value).parameters.values())
        except (TypeError, ValueError):
            return self.name
        plain = (int, float, str, bool, type(None))
        shown = [
            p.replace(
                annotation=p.empty,
                default=p.default if p.default is p.empty or isinstance(p.default, plain) else ...,
            )
            for p in found
        ]
        return f"{self.name}{inspect.Signature(shown)}".replace("Ellipsis", "...")

    @property
    def kind_of_first(self) -> str:
        """What the first parameter is: `model`, `parameters`, `gradients`, `tensor`, `optimizer`,
        or empty where nothing tells. Its use in the source outweighs its annotation, that its name.
        """
        use = self.source.use_of(self.first)
        if use in ("model", "optimizer"):
            return use
        kind = self._annotated_kind() or self._named_kind()
        if kind in ("parameters", "gradients"):
            return "parameters" if "grad" in self.source.attributes else kind
        return kind

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


def named_parameters(value: Callable[..., Any], *, skip: int = 0) -> Parameters:
    """What a callable takes by name; nothing where that cannot be known."""
    try:
        found = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return []
    return [p for p in found[skip:] if p.kind in _NAMED]


def takes_any_name(value: Callable[..., Any]) -> bool:
    """Whether a callable has `**kwargs`."""
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in found)
