"""A method of an agent or a model: called on a stand-in that has what the method asks of itself."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from distcheck.contract import Step, contract_of
from distcheck.errors import UsageError
from distcheck.training.adapters import load_form, names, proposals
from distcheck.training.adapters.after_backward import AfterBackward
from distcheck.training.adapters.gradients import wait_for
from distcheck.training.adapters.not_given import NotKnownError
from distcheck.training.adapters.not_given import stand_in as not_given
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import Source
from distcheck.training.adapters.target import Target
from distcheck.training.definitions import source_file
from distcheck.training.loaded import LoadedStrategy

PRECEDENCE = 30
EXAMPLE = "FILE.py:Class.method; self.model and the like are filled in, more by --arg self.x=..."


def fits(target: Target) -> bool:
    """A method that was reached through its class."""
    return target.is_unbound


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after every backward on an object whose constructor never ran."""
    if target.owner is None or not target.is_unbound:
        raise refusal(target, f"strategy {target.spec!r} is not a method of a class")
    required = {p.name for p in target.required}
    handed = target.first in required and target.kind_of_first in ("tensor", "gradients")
    if handed and target.adaptation.form is None:
        return _handed_gradients(target, scene)
    what = f"strategy {target.spec!r} has the signature {target.signature}"
    filling = (
        Filling(scene, target.value, what=what, supplied=["self"], skip=0)
        if (_self_name(target) == "self")
        else None
    )
    if filling is None:
        raise refusal(target, f"{what}, whose first parameter is not self")
    attributes = dict(_of_self(scene))
    uses = _Uses(target, attributes)
    if "arguments" in uses.meanings.values():
        scene.note_namespace()
    making, why_not = _making(target.owner, scene, uses.unknown)
    stand_in = _stand_in(target.owner, scene, attributes, uses.unknown, why_not)
    steps = uses.steps
    after = AfterBackward(scene, repr(target.spec))

    def sync(model: nn.Module, step: Step) -> None:
        nonlocal stand_in, making
        if making is not None:  # when model and optimizer are there
            stand_in, making = making.call(), None
        if isinstance(stand_in, nn.Module) and "model" not in stand_in._modules:
            stand_in._modules["model"] = scene.live_model
        if steps:
            wait_for(filling.call(stand_in))
        else:
            after.run(lambda: filling.call(stand_in))

    also = ", which takes the optimizer's step as well" if steps else ""
    what = "an object that " + ("has the model" if making is None else "its constructor made")
    return LoadedStrategy(
        contract=contract_of(target.value),
        file=source_file(target.owner),
        sync=sync,
        update="sync" if steps else "loop",
        note=f"{target.owner.__name__}.{target.signature}, on {what}{also}",
    )


def _handed_gradients(target: Target, scene: Scene) -> LoadedStrategy:
    """A method that is called with gradients, as the function that it is but for its object."""
    method, owner = target.value, target.owner
    assert owner is not None
    attributes = dict(_of_self(scene))
    uses = _Uses(target, attributes)
    making, why_not = _making(owner, scene, uses.unknown, of_a_module=True)
    stand_in = _stand_in(owner, scene, attributes, uses.unknown, why_not)

    @functools.wraps(method)
    def bound(*handed: Any, **named: Any) -> Any:
        nonlocal stand_in, making
        if making is not None:
            stand_in, making = making.call(), None
        return method(stand_in, *handed, **named)

    signature = inspect.signature(method)
    bound.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    function = dataclasses.replace(target, value=bound, owner=None)
    form = "tensor-mean" if target.kind_of_first == "tensor" else "gradients"
    return load_form(form).adapt(function, scene)


def _of_self(scene: Scene) -> Iterator[tuple[str, str]]:
    """What was said of `self`."""
    for name, text in scene.adaptation.arguments:
        if name.startswith("self."):
            scene.used.add(name)
            yield name.removeprefix("self."), text


def _making(
    owner: type, scene: Scene, unknown: set[str], *, of_a_module: bool = False
) -> tuple[Filling | None, str]:
    """How to make the object, where its constructor sets what is `unknown` and asks for nothing but
    what is known when it is called first; otherwise what it asks for besides. A constructor that
    need not run is left alone: it may read data; so is that of a module which may be the model.
    """
    constructor = vars(owner).get("__init__")
    if constructor is None or not unknown:
        return None, ""
    if issubclass(owner, nn.Module) and not of_a_module:
        return None, ""
    if inspect.isabstract(owner) or not unknown <= Source(constructor).sets_of("self"):
        return None, ""
    try:
        return Filling(scene, owner, what=f"its constructor {owner.__name__}() sets that"), ""
    except UsageError as error:
        return None, str(error)


def _self_name(target: Target) -> str:
    code = getattr(target.value, "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else ""


class _Uses:
    """What a method, and those that it calls on itself, ask of `self`. Raises UsageError for two
    models.
    """

    def __init__(self, target: Target, attributes: dict[str, str]) -> None:
        assert target.owner is not None
        wanted: set[str] = set()
        self.steps = False  # whether it calls step() of what stands for the optimizer
        waiting, seen = [target.name], set[str]()
        while waiting:
            name = waiting.pop()
            seen.add(name)
            source = Source(getattr(target.owner, name))
            used = source.attributes_of("self")
            wanted |= used
            optimizers = [n for n in used if names.MEANINGS.get(n) == "optimizer"]
            self.steps |= any(source.calls("self", n, "step") for n in optimizers)
            waiting += [n for n in used - seen if callable(vars(target.owner).get(n))]
        wanted = {n for n in wanted if not hasattr(target.owner, n) and n not in attributes}
        self.unknown = {n for n in wanted if n not in names.MEANINGS}
        self.meanings = {n: names.MEANINGS[n] for n in wanted - self.unknown}
        models = sorted(n for n, meaning in self.meanings.items() if meaning == "model")
        if len(models) > 1:
            raise refusal(
                target,
                f"{target.spec!r} works on several models ({', '.join(models)}), but only one is "
                "trained",
            )


def _stand_in(
    owner: type, scene: Scene, attributes: dict[str, str], unknown: set[str], why_not: str
) -> Any:
    """An object of a class derived from `owner`, never initialised, that finds names by meaning;
    what is `unknown` fails when it is used.
    """

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        if issubclass(owner, nn.Module):
            modules = self.__dict__.get("_modules", {})
            if name in modules:
                return modules[name]
        if name in attributes:
            return scene.keep(f"self.{name}", attributes[name])
        meaning = scene.meaning_of(name)
        if meaning in ("parameters", "named_parameters"):  # what an object keeps is not a generator
            meaning = f"listed_{meaning}"
        if not meaning:
            said = f"give {proposals.options('--arg', [f'self.{name}'], owner)}"
            sentence = (
                f"the code uses self.{name}, which distcheck does not know; {why_not or said}"
            )
            if name in unknown:
                return not_given(name, sentence)
            raise NotKnownError(sentence)
        try:
            return scene.value(meaning)
        except UsageError as error:
            raise AttributeError(str(error)) from error

    derived: Any = type(owner.__name__, (owner,), {"__getattr__": __getattr__})
    derived.__abstractmethods__ = frozenset()  # it has what the method asks for, and no more
    made: Any = object.__new__(derived)
    if issubclass(owner, nn.Module):
        nn.Module.__init__(made)
    return made
