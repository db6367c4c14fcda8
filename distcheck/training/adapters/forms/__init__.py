"""The table of forms: how user code that synchronizes gradients is written, and how each is called.

A row states when the code is called and what its subject is: the model, gradients or a tensor.
`../called.py` executes it. A row without both is implemented in a file of the same name here
(`comm_hook.py` for `comm-hook`), with

 fits(target) -> bool   True if the code has the form, judged by its signature and source
 adapt(target, scene) -> LoadedStrategy

The first form that fits, in row order, is selected. Does not import torch, so that a misspelled
`--as` fails before torch is imported.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from distcheck.errors import UsageError
from distcheck.training.adapters import names
from distcheck.training.adapters.source import Source, unwrap_function
from distcheck.training.adapters.target import Target

Moment = Literal[
    "once before training",  # a returned module is trained
    "around backward",  # it returns a context manager
    "after backward",  # it changes gradients in place, or returns them
    "for the optimizer's step",  # in place of the loop's step
    "after the optimizer's step",
]
Subject = Literal["model", "parameters", "gradients", "each gradient", "flat gradient"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of user code; `name` is its `--as`.

    lacks   end of the error message for code that cannot be called in this form
    note    sentence that is added to the report
    trains  the workload that trains code which is itself the model or the loss
    """

    name: str
    example: str
    fits_row: Callable[[Target], bool] | None = None
    called: Moment | None = None
    handed: Subject = "model"  # unless its first parameter means something else
    divides: bool = False  # divides each gradient by the world size afterwards
    lacks: str = ""
    note: str = ""
    # True if it needs a forward or backward pass, or a shard of the parameters, on every rank.
    computes: bool = False
    takes_methods: bool = False  # True if --finish and --reset apply
    trains: str = ""
    file: str = ""  # if its name is not the form's

    @property
    def own(self) -> Any:
        """The module of a form with special behavior."""
        return importlib.import_module(f"{__name__}.{self.file or self.name.replace('-', '_')}")

    def fits(self, target: Target) -> bool:
        if self.fits_row is None and (self.called or self.file):
            return False  # only on request
        fits: Callable[[Target], bool] = self.fits_row or self.own.fits
        return fits(target)


def is_context_function(value: Any) -> bool:
    """Return True if a call returns a context manager, by `contextlib.contextmanager`."""
    inner = getattr(unwrap_function(value), "__wrapped__", None)
    return inspect.isgeneratorfunction(inner)


def _is_context(target: Target) -> bool:
    """Return True for a function decorated by contextlib, or a class with __enter__ and __exit__
    that is neither a module nor has a method to call after backward.
    """
    if not target.is_class:
        return is_context_function(target.value) and not target.is_unbound
    from torch import nn  # importing the table must not import torch

    has_both = all(hasattr(target.value, name) for name in ("__enter__", "__exit__"))
    others = (*names.FINISH, "forward", "__call__", "wrap", "step")
    own = [base for base in target.value.__mro__ if base.__module__ != "contextlib"]
    is_more = any(name in vars(base) for base in own for name in others)
    return has_both and not is_more and not issubclass(target.value, nn.Module)


def _calls_step(target: Target) -> bool:
    """Return True if it takes an optimizer and calls its step, directly or in its module."""
    if not target.is_function:
        return False
    if target.maker is not None and target.source.steps_optimizer:
        return True
    known = vars(target.module) if target.module is not None else {}
    called = [known[name] for name in target.source.words if inspect.isfunction(known.get(name))]
    return any(
        "step" in source.attributes_of(p.name)
        for source in [target.source, *map(Source, called)]
        for p in target.parameters
        if p.name in ("optimizer", "optim", "opt", "optimiser")
    )


_VALUES = {"data", "state_dict", "parameters_to_vector"}
_COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "Allreduce"}


def _exchanges_values(target: Target) -> bool:
    """Return True if it communicates the values of a model's parameters, and reads no gradient."""
    if not target.is_function or target.is_unbound or target.kind_of_first != "model":
        return False
    if target.module is None:
        return False
    read = set[str]().union(*(source.attributes for source in target.reached))
    return "grad" not in read and bool(read & _VALUES) and bool(read & _COLLECTIVES)


FORMS = (
    Form(
        name="strategy",
        example="an object or class with wrap(model), backward(), sync() or scale_loss()",
    ),
    Form(
        name="comm-hook",
        example="hook(state, bucket) or hook(bucket), registered with DDP; --arg state=...",
        computes=True,
    ),
    Form(
        name="context",
        example="with f(model): loss.backward(), a context manager around backward",
        fits_row=_is_context,
        called="around backward",
        lacks="is not a context manager",
        note=", a context manager: entered before backward, exited after it",
        computes=True,
    ),
    Form(
        name="sharded-optimizer",
        example="class Sharded(params, optimizer_cls, **kwargs), for which distcheck averages the "
        "gradients; class Sharded(optimizer), which averages them itself",
        computes=True,
        takes_methods=True,
    ),
    Form(
        name="optimizer",
        example="class Wrapper(optimizer, ...) with step(), which synchronizes before the inner "
        "step, or with a --finish METHOD after backward",
        takes_methods=True,
    ),
    Form(
        name="own-optimizer",
        example="class DistributedSGD(torch.optim.SGD), whose step() synchronizes first",
    ),
    Form(
        name="sharded-module",
        example="class FSDP(module, ...), whose parameters() are this rank's shards; unsharded "
        "for comparison",
        computes=True,
    ),
    Form(
        name="wrapper",
        example="class Wrapper(module, ...); --finish METHOD after backward, --reset METHOD after "
        "the step",
        computes=True,
        takes_methods=True,
    ),
    Form(
        name="autograd",
        example="class Wrapper(module), whose forward pass applies a function that averages in "
        "backward",
        file="wrapper",
        computes=True,
        takes_methods=True,
    ),
    Form(
        name="method",
        example="FILE.py:Class.method; self.model and similar attributes are filled in, others "
        "with --arg self.x=...",
    ),
    Form(
        name="hooks",
        example="f(model), called once: registers hooks that synchronize during backward",
        fits_row=lambda one: (
            one.is_function
            and one.source.registers_hooks
            and one.kind_of_first in ("model", "parameters", "")
        ),
        called="once before training",
        lacks="is not a function of a model",
        note=", called once before training: it registers hooks",
        computes=True,
    ),
    Form(
        name="engine",
        example="initialize(model, optimizer), which returns an engine with engine(inputs), "
        "engine.backward(loss) and engine.step()",
        computes=True,
    ),
    Form(
        name="step",
        example="f(model, optimizer), which calls optimizer.step() after synchronizing",
        fits_row=_calls_step,
        called="for the optimizer's step",
        lacks="is not a function",
        note=", which performs the optimizer step as well",
    ),
    Form(
        name="steps-inside",
        example="f(model, lr), which performs the plain SGD step itself: p.data -= lr * p.grad",
    ),
    Form(
        name="after-step",
        example="f(model), which averages parameters, called after the optimizer's step",
        fits_row=_exchanges_values,
        called="after the optimizer's step",
        lacks="is not a function",
        note=", which synchronizes parameters and no gradients, called after the optimizer step; "
        "--accept local-sgd:PERIOD judges the average of parameters",
    ),
    Form(
        name="parameters",
        example="f(params), which modifies every p.grad",
        fits_row=lambda target: target.is_function and target.kind_of_first == "parameters",
        called="after backward",
        handed="parameters",
        lacks="takes no list of parameters",
        note=" of the parameters, called after backward",
    ),
    Form(
        name="gradients",
        example="f(grads), a list of tensors, in place or returning a list; f(grad_in, grad_out)",
        fits_row=lambda target: target.is_function and target.kind_of_first == "gradients",
        called="after backward",
        handed="gradients",
        lacks="takes no list of gradients",
        note=" of the list of gradients, called after backward",
    ),
    Form(
        name="tensor-mean",
        example="f(tensor), f(send, recv) or tensor = f(tensor), which leaves the mean",
        fits_row=lambda target: target.is_function and target.kind_of_first == "tensor",
        called="after backward",
        handed="each gradient",
        lacks="takes no tensor",
        note=", applied to every gradient as is; pass --as tensor-sum if it only sums",
    ),
    Form(
        name="model",
        example="f(model), f(model, world_size, group, ...), called after backward",
        fits_row=lambda target: target.is_function and not target.is_unbound,
        called="after backward",
        lacks="is not a function",
        note=", called after backward",
    ),
    Form(
        name="tensor-sum",
        example="the same, but it leaves the sum; distcheck divides it by the world size",
        # A sum that the caller divides looks the same as a forgotten division.
        called="after backward",
        handed="each gradient",
        divides=True,
        lacks="takes no tensor",
        note=", applied to every gradient, which is then divided by the world size",
    ),
    Form(
        name="flat-mean",
        example="the same as tensor-mean, of one vector with all gradients",
        called="after backward",
        handed="flat gradient",
        lacks="takes no tensor",
        note=", applied to a vector of all gradients",
    ),
    Form(
        name="loss",
        example="loss(features, labels), or of two views, a function or a module that "
        "communicates by itself; distcheck averages the gradients",
        file="loss",  # a function of two tensors can be anything
        computes=True,
        trains="features",
    ),
    Form(
        name="metric",
        example="an object with update(...) on a rank's samples and compute() over those of all",
        file="loss",
        computes=True,
        trains="features",
    ),
)


@cache
def form_names() -> list[str]:
    return sorted(form.name for form in FORMS)


def form_of(name: str) -> Form:
    """Return a form by its name. Raises UsageError for an unknown name."""
    for form in FORMS:
        if form.name == name:
            return form
    raise UsageError(f"unknown form --as {name}; known are {', '.join(form_names())}")


def trained_with(form: str | None) -> str:
    """Return the workload that code of a form requires; empty if any workload is possible."""
    return form_of(form).trains if form else ""


def choose_form(target: Target) -> Form | None:
    """Return the first form that fits the code; None if no form fits."""
    return next((form for form in FORMS if form.fits(target)), None)
