"""A method of an agent or a model, called on a stand-in with the attributes that it reads."""

import contextlib
import dataclasses
import inspect
from typing import Any

from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.training.adapters import unknown
from distcheck.training.adapters.answers import AfterBackward, wait_for_handles
from distcheck.training.adapters.called import adapt_row
from distcheck.training.adapters.forms import form_of
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target, method_without_self, source_file, sources_of
from distcheck.training.loaded import LoadedStrategy


def fits(target: Target) -> bool:
    """Return True for a method that the user selected through its class."""
    return target.is_unbound


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that calls the method after every backward, on an object whose constructor
    did not run or, if necessary, on a constructed object. Raises UsageError.
    """
    if target.owner is None or not target.is_unbound:
        raise refusal_error(target, f"strategy {target.spec!r} is not a method of a class")
    required = {p.name for p in target.required}
    handed = target.first in required and target.kind_of_first in ("tensor", "gradients")
    if handed and target.adaptation.form is None:
        return _handed_gradients(target, scene)
    code = getattr(target.value, "__code__", None)
    if code is None or not code.co_argcount or code.co_varnames[0] != "self":
        raise refusal_error(target, f"{target.described}, whose first parameter is not self")
    filling = Filling(scene, target.value, what=target.described, supplied=["self"])
    uses = _Uses(target, scene)
    if "arguments" in uses.meanings:
        scene.note_namespace()
    making = uses.making(of_a_module=False)
    stand_in = None if making is not None else uses.stand_in()
    after = AfterBackward(scene, repr(target.spec))
    note = f"{target.owner.__name__}.{target.signature}, on an object that "
    note += "has the model" if making is None else "its constructor made"
    note += ", which performs the optimizer step as well" if uses.steps else ""

    def sync(model: nn.Module, step: Step) -> None:
        nonlocal stand_in
        if stand_in is None and making is not None:  # once model and optimizer exist
            stand_in = making.call()
        if isinstance(stand_in, nn.Module) and "model" not in dict(stand_in.named_children()):
            stand_in.model = scene.current_model
        if uses.steps:
            wait_for_handles(filling.call(stand_in))
        else:
            after.run(lambda: filling.call(stand_in))

    loaded = target.loaded(note, sync=sync, update="sync" if uses.steps else "loop")
    return dataclasses.replace(loaded, file=source_file(target.owner))


def _handed_gradients(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a method that takes gradients as the function form, bound to its object."""
    uses = _Uses(target, scene)
    making = uses.making(of_a_module=True)
    stand_in = None if making is not None else uses.stand_in()
    bound = method_without_self(target.value, lambda: stand_in if making is None else making.call())
    form = form_of("tensor-mean" if target.kind_of_first == "tensor" else "gradients")
    return adapt_row(form, dataclasses.replace(target, value=bound, owner=None), scene)


class _Uses:
    """The attributes that a method, and the methods it calls on itself, read from `self`. Raises
    UsageError for two models.
    """

    def __init__(self, target: Target, scene: Scene) -> None:
        assert target.owner is not None
        self._owner, self._scene = target.owner, scene
        self._attributes = {  # set by --arg
            name.removeprefix("self."): text
            for name, text in target.arguments.items()
            if name.startswith("self.")
        }
        scene.used |= {f"self.{name}" for name in self._attributes}
        sources = sources_of(target.owner, target.name)
        self.steps = any(source.steps_optimizer for source in sources)
        wanted = set[str]().union(*(source.attributes_of("self") for source in sources))
        wanted = {n for n in wanted if not hasattr(target.owner, n) and n not in self._attributes}
        self._unknown = {n for n in wanted if not meaning_of(n)}
        self._why_not = ""  # why the object cannot be constructed
        self.meanings = {meaning_of(n) for n in wanted}
        models = sorted(n for n in wanted if meaning_of(n) == "model")
        if len(models) > 1:
            raise refusal_error(
                target,
                f"{target.spec!r} uses several models ({', '.join(models)}), but only one is "
                "trained",
            )

    def making(self, *, of_a_module: bool) -> Filling | None:
        """Return the constructor call, if the constructor sets the unknown attributes and needs
        only known arguments; None otherwise. An unnecessary constructor is not called, because it
        may read data; nor is that of a module which may be the model.
        """
        owner = self._owner
        constructor = vars(owner).get("__init__")
        if constructor is None or not self._unknown or inspect.isabstract(owner):
            return None
        if issubclass(owner, nn.Module) and not of_a_module:
            return None
        if not self._unknown <= Source(constructor).attributes_of("self", assigned=True):
            return None
        try:
            return Filling(self._scene, owner, what=f"its constructor {owner.__name__}() sets that")
        except UsageError as error:
            self._why_not = str(error)
            return None

    def stand_in(self) -> Any:
        """Return an uninitialized object of a subclass of the owner that resolves attributes by
        their meaning; an unknown attribute raises when it is used.
        """
        owner, find = self._owner, self._find

        def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
            if issubclass(owner, nn.Module):
                with contextlib.suppress(AttributeError):
                    return nn.Module.__getattr__(self, name)
            return find(name)

        derived: Any = type(owner.__name__, (owner,), {"__getattr__": __getattr__})
        derived.__abstractmethods__ = frozenset()  # it has what the method reads
        made: Any = object.__new__(derived)
        if issubclass(owner, nn.Module):
            nn.Module.__init__(made)
        return made

    def _find(self, name: str) -> Any:
        if name in self._attributes:
            return self._scene.keep(f"self.{name}", self._attributes[name])
        meaning = meaning_of(name)
        if meaning in ("parameters", "named_parameters"):  # an attribute is not a generator
            meaning = f"listed_{meaning}"
        if not meaning:
            give = f"pass {unknown.suggested_options('--arg', [f'self.{name}'], self._owner)}"
            sentence = (
                f"the code uses self.{name}, which distcheck does not know; {self._why_not or give}"
            )
            if name in self._unknown:
                return unknown.stand_in(name, sentence)
            raise unknown.UnknownAttributeError(sentence)
        try:
            return self._scene.value(meaning)
        except UsageError as error:
            raise AttributeError(str(error)) from error
