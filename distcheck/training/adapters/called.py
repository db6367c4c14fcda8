"""Executes a row of the table of forms: calls the code at the right time, and uses its results.
Parameters other than the subject are filled in by name.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Number
from typing import Any

import torch
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.answers import (
    AfterBackward,
    set_gradients_from,
    wait_for_handles,
    with_gradient,
)
from distcheck.training.adapters.forms import Form, is_context_function
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.source import COLLECTIVES
from distcheck.training.adapters.target import (
    Target,
    is_annotated_number,
    takes_any,
    wants_list,
)
from distcheck.training.loaded import LoadedStrategy

Sync = Callable[[nn.Module, Step], None]


def adapt_row(form: Form, target: Target, scene: Scene) -> LoadedStrategy:
    """Return the code as a strategy. Raises UsageError if it cannot be called in this form."""
    around, once = form.called == "around backward", form.called == "once before training"
    is_other = target.is_unbound if around else target.is_class
    lacks_subject = (once or form.handed != "model") and not target.first
    if not callable(target.value) or is_other or lacks_subject:
        raise refusal_error(target, f"strategy {target.spec!r} {form.lacks}")
    if once and is_context_function(target.value):
        raise UsageError(
            f"strategy {target.spec!r} is a context manager, which --as {form.name} would call "
            "but never enter; pass --as context"
        )
    note = f"{target.signature}{form.note}"
    if form.handed == "gradients":
        return target.loaded(note, sync=_call_with_all_gradients(target, scene))
    if form.handed in ("each gradient", "flat gradient"):
        return target.loaded(note, sync=_call_with_tensors(form, target, scene))
    call = _call_of(form, target, scene)
    if once:
        return target.loaded(note, wrap=_call_in_wrap(call))
    if around:
        scale_loss, sync = _enter_and_leave(target, call)
        return target.loaded(note, scale_loss=scale_loss, sync=sync)
    if form.called == "for the optimizer's step":
        return target.loaded(note, sync=lambda model, step: wait_for_handles(call()), update="sync")
    sync = _call_after(form, target, scene, call)
    if form.called == "after the optimizer's step":
        return target.loaded(note, sync=sync, update="sync")
    if _reads_module(target) or _holds_the_model(target):
        note += ", with an object that holds the model"
    elif form.handed == "model" and _needs_no_remark(target):
        note = ""
    elif target.source.returns_many:
        note += ", each tensor that it returns for a parameter is taken as its gradient"
    return target.loaded(note, sync=sync)


def _needs_no_remark(target: Target) -> bool:
    """Return True for f(model) and f(model, step)."""
    if target.adaptation.arguments or target.source.returns_many:
        return False
    kinds = {target.kind_of_first, target.source.meaning_of(target.first)}
    return len(target.required) <= 1 and kinds <= {"model", ""}


def _call_of(form: Form, target: Target, scene: Scene) -> Callable[[], Any]:
    """Return the call with the model, with its parameters if the code works on those, or with
    neither if the name of its first parameter means something else.
    """
    first, of_several = target.first, target.kind_of_first == "models"
    of_parameters = "parameters" in (form.handed, target.kind_of_first)
    if of_several and not target.words & COLLECTIVES:
        raise UsageError(
            f"{target.described}: {first} is a list of models in one process, and no collective is "
            "called; distcheck runs one model per process, so pass the function that "
            "synchronizes gradients between processes"
        )
    is_subject = of_parameters or target.source.meaning_of(first) in ("", "model")
    supplied = [first] if first and is_subject and first not in target.arguments else []
    takes_all, stepped = False, list[str]()
    if form.handed == "model" and form.called in ("after backward", "after the optimizer's step"):
        takes_all = takes_any(target.value, "VAR_POSITIONAL") and not target.required
        stepped = [
            p.name
            for p in target.parameters[1:2]
            if p.name == "step" and not is_annotated_number(p)
        ]
        if not target.parameters and not takes_all and not scene.uses & {"model", "optimizer"}:
            raise refusal_error(
                target, f"{target.described}, which takes neither a model nor gradients"
            )
    filling = Filling(scene, target.value, what=target.described, supplied=supplied, also=stepped)
    listed = any(wants_list(p, target.source) for p in target.parameters if p.name == first)
    listed |= meaning_of(first).startswith("listed_")
    named = "named_" * (
        meaning_of(first).endswith("named_parameters") or target.source.unpacks_pairs(first)
    )
    if supplied and of_parameters and not listed:
        scene.handed_once[first] = f"@{named}param_list"

    is_wrapped, owner = _reads_module(target), _Owner(scene) if _holds_the_model(target) else None

    def call() -> Any:
        model = scene.current_model
        if is_wrapped and not hasattr(model, "module"):
            model = nn.ModuleDict({"module": model})  # as DDP holds it
        if takes_all:  # f(*arguments)
            scene.calls += 1
            return target.value(model, scene.step)
        of_it: Any = getattr(model, f"{named}parameters")()
        of_it = list(of_it) if listed else of_it
        subject = of_it if of_parameters else [model] if of_several else owner or model
        return filling.call(*[subject][: len(supplied)])

    return call


def _reads_module(target: Target) -> bool:
    """Return True if it reads `model.module` without checking that it exists."""
    looks = target.source.words & {"hasattr", "getattr", "isinstance"}
    return "module" in target.source.attributes_of(target.first) and not looks


def _holds_the_model(target: Target) -> bool:
    """Return True if its first parameter is an object that holds the only model, by its name and
    its attributes. Anything else may be the model itself, with parts of such names.
    """
    asked = [meaning_of(name) for name in target.source.attributes_of(target.first)]
    return target.first in names.OWNERS and not target.kind_of_first and asked.count("model") == 1


class _Owner:
    """An object that has the model, the optimizer and what else is known, by usual names."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def __getattr__(self, name: str) -> Any:
        meaning = meaning_of(name)
        if name.startswith("_") or not meaning:
            raise AttributeError(f"an object that holds the model has no attribute {name!r} here")
        listed = "listed_" * (meaning in ("parameters", "named_parameters"))
        return self._scene.value(f"{listed}{meaning}")


def call_of_method(scene: Scene, made: list[Any], name: str | None, what: str) -> Sync:
    """Return a call of a method of the object that was created last; a no-op if `name` is empty."""

    def call(model: nn.Module, step: Step) -> None:
        if not name:
            return
        scene.step = step
        method = getattr(made[-1], name, None)
        if not callable(method):
            raise UsageError(f"{what} created an object without a method {name}()")
        wait_for_handles(Filling(scene, method, what=f"{what}, {name}").call())

    return call


def _call_in_wrap(call: Callable[[], Any]) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        answer = call()
        return answer if isinstance(answer, nn.Module) else model

    return wrap


def _enter_and_leave(
    target: Target, call: Callable[[], Any]
) -> tuple[Callable[[torch.Tensor, Step], torch.Tensor], Sync]:
    """Return functions that enter the context at a step's first backward, and leave it."""
    entered: list[AbstractContextManager[Any]] = []

    def enter(loss: torch.Tensor, step: Step) -> torch.Tensor:
        if not entered:
            made = call()
            if not hasattr(made, "__exit__"):
                raise UsageError(
                    f"{target.spec!r} returned a {type(made).__name__}; expected a context "
                    "manager; pass the form with --as"
                )
            made.__enter__()
            entered.append(made)
        return loss

    def leave(model: nn.Module, step: Step) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    return enter, leave


def _call_after(form: Form, target: Target, scene: Scene, call: Callable[[], Any]) -> Sync:
    after = AfterBackward(scene, repr(target.spec))

    def sync(model: nn.Module, step: Step) -> None:
        if form.called == "after the optimizer's step":
            scene.value("optimizer").step()
        answer = after.run(call)
        is_module = isinstance(answer, nn.Module) and answer not in (model, scene.model)
        if is_module and form.handed == "model":
            raise UsageError(
                f"{target.spec!r} returned a different module when it was called after backward; "
                "if "
                "it wraps the model once, pass --as wrapper"
            )

    return sync


def _call_with_all_gradients(target: Target, scene: Scene) -> Sync:
    into = [p.name for p in target.required[1:] if p.name in names.GRADIENTS_OUT][:1]
    into += [p.name for p in target.required[1:] if into and p.name in names.MEMORIES][:1]
    memory: list[torch.Tensor] = []
    filling = Filling(scene, target.value, what=target.described, supplied=[target.first, *into])

    def sync(model: nn.Module, step: Step) -> None:
        parameters = with_gradient(scene.parameters())
        tensors = [parameter.grad for parameter in parameters]
        if len(memory) != len(parameters):
            memory[:] = [torch.zeros_like(parameter) for parameter in parameters]
        means = [torch.zeros_like(parameter) for parameter in parameters]
        answer = wait_for_handles(filling.call(tensors, *[means, memory][: len(into)]))
        if into:  # its return value is ignored
            answer = means
        # The return value, or else the list that it received, whose entries it may replace.
        set_gradients_from(
            parameters, tensors if answer is None else answer, what=repr(target.spec)
        )

    return sync


def _call_with_tensors(form: Form, target: Target, scene: Scene) -> Sync:
    into = [p.name for p in target.required[1:] if p.name in names.RECEIVED]
    if not into and target.first in names.SENT:
        into = [p.name for p in target.parameters[1:] if p.name in names.RECEIVED]
    supplied = [target.first, *into[:1]]
    filling = Filling(scene, target.value, what=target.described, supplied=supplied)
    as_arrays = "ndarray" in target.first_annotation or target.first.endswith(("array", "arr"))

    def reduce(gradient: torch.Tensor) -> torch.Tensor:
        # Pass the gradient itself: an update of a copy by the code must not take effect.
        sent = gradient.contiguous() if as_arrays else gradient
        received = torch.zeros_like(sent)
        tensors = [sent, received][: len(supplied)]
        handed = [t.cpu() for t in tensors] if as_arrays else tensors  # arrays are on the CPU
        answer = wait_for_handles(filling.call(*(t.numpy() if as_arrays else t for t in handed)))
        for tensor, seen in zip(tensors, handed, strict=True):
            if seen is not tensor:
                tensor.copy_(seen)
        if into:
            return received
        # A number (elements sent, rounds, seconds) is not a gradient: it works in place.
        in_place = answer is None or isinstance(answer, Number | str)
        return sent if in_place else torch.as_tensor(answer)

    def sync(model: nn.Module, step: Step) -> None:
        parameters = with_gradient(scene.parameters())
        if form.handed == "flat gradient":
            _reduce_flat(parameters, reduce, step, what=repr(target.spec))
            return
        for parameter in parameters:
            assert parameter.grad is not None
            set_gradients_from([parameter], reduce(parameter.grad), what=repr(target.spec))
            if form.divides:
                parameter.grad.div_(step.shards)

    return sync


def _reduce_flat(parameters: list[nn.Parameter], reduce: Any, step: Step, *, what: str) -> None:
    """Reduce a vector of all gradients of each dtype. If the ranks divide its length, it begins
    with one more element, so that a remainder which the code drops is noticed.
    """
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        some = [p for p in parameters if p.dtype == dtype]
        parts = [p.grad.reshape(-1) for p in some if p.grad is not None]
        sizes = [len(part) for part in parts]
        more = int(sum(sizes) % step.world_size == 0)
        flat = torch.cat([parts[0].new_zeros(more), *parts])
        answer = reduce(flat)
        if answer.shape != flat.shape:
            set_gradients_from(some, answer, what=what)
        pieces = answer[more:].split(sizes)
        set_gradients_from(
            some, [t.view(p.shape) for t, p in zip(pieces, some, strict=True)], what=what
        )
