"""A function that writes a plain SGD step into the parameters after it has synchronized.

Gradients are derived from its update: (before - after) / lr. With parameters of ordinary size, the
subtraction loses most of a gradient's digits: `after` is rounded to u |after|, which is u |after| /
lr in the gradient. The code is therefore called with zero parameters and a power of two as the
learning rate: it then writes -lr times its gradient, and dividing that by lr is exact (a product
with 32 neither rounds nor underflows; it overflows only if the gradient is within a factor of 32 of
the largest value). No bound is widened; all checks apply as usual.

Code that calls optimizer.step() on one rank for all, such as a server that sends parameters,
receives a plain SGD optimizer with that rate (`--as steps-inside`).

The method is valid for updates that add a multiple of this step's gradient to a parameter, whatever
its value. After the last step the code is called once more with the current parameters and zero
gradients. If it then changes them, it uses weight decay or momentum, and is rejected.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.training.adapters.answers import wait_for_handles
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal_error
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

RATE = 32.0


class ZeroGradientError(ArithmeticError):
    """Raised if the code divides zero by zero, because a gradient is zero."""


def fits(target: Target) -> bool:
    """Return True for a function that subtracts from parameters' data at a settable rate."""
    is_function = target.is_function and not target.is_unbound
    return is_function and target.source.descends and bool(_rates(target))


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Return a strategy that calls the function after backward on zero parameters. The workload's
    optimizer takes the step. Raises UsageError.
    """
    if target.is_class or target.is_unbound or not target.first:
        raise refusal_error(
            target, f"strategy {target.spec!r} is not a function of a model or of parameters"
        )
    takes_optimizer = any(meaning_of(p.name) == "optimizer" for p in target.parameters)
    if not _rates(target) and not takes_optimizer:
        raise refusal_error(
            target,
            f"{target.described}: gradients are derived from its step by dividing by the learning "
            "rate, which is unknown; make it a parameter lr, or set its name in the module with "
            f"--set lr={RATE:g}",
        )
    scene.rate = rate = _rate_of(target)
    supplied = [target.first] if meaning_of(target.first) in ("", "model") else []
    filling = Filling(
        scene, target.value, what=target.described, supplied=supplied, also=_rates(target)
    )

    def call() -> None:
        with _plain_sgd(scene) if takes_optimizer else contextlib.nullcontext():
            wait_for_handles(filling.call(*([scene.current_model] if supplied else [])))

    sync, close = take_gradients(target, scene, call, rate)
    return target.loaded(
        f"{target.signature}, which performs the step as well: gradients are its update of zero "
        f"parameters, divided by a learning rate of {rate:g}; the step is the workload's",
        sync=sync,
        close=close,
    )


def take_gradients(
    target: Target, scene: Scene, call: Callable[[], None], rate: float
) -> tuple[Callable[[nn.Module, Step], None], Callable[[], None]]:
    """Return `sync` and `close` of a strategy whose call takes a plain SGD step."""

    def sync(model: nn.Module, step: Step) -> None:
        parameters = scene.parameters()
        before = [p.detach().clone() for p in parameters]
        stepped = [p for p in parameters if p.grad is not None]
        with torch.no_grad():
            for parameter in parameters:
                parameter.zero_()
        call()
        with torch.no_grad():
            moved = any(bool(p.any()) for p in parameters)
            if stepped and not moved and step.samples:
                raise UsageError(
                    f"{target.spec!r} was assumed to update the parameters itself, but did not "
                    "update zero parameters; override with --as"
                )
            for parameter, kept in zip(parameters, before, strict=True):
                gradient = parameter.detach().neg() / rate
                absent = not any(parameter is p for p in stepped) and not bool(gradient.any())
                parameter.copy_(kept)
                parameter.grad = None if absent else gradient

    return sync, lambda: _refuse_more_than_a_step(target, call, scene)


@contextlib.contextmanager
def _plain_sgd(scene: Scene) -> Iterator[None]:
    """Provide a plain SGD optimizer to code that requests the optimizer."""
    kept = scene.optimizer
    scene.optimizer = torch.optim.SGD(scene.parameters(), lr=scene.rate or RATE)
    try:
        yield
    finally:
        scene.optimizer = kept


def _rates(target: Target) -> list[str]:
    """Return the names by which the code takes its learning rate."""
    variables = [name for name, _ in target.adaptation.variables]
    taken = [p.name for p in target.parameters]
    return [name for name in [*taken, *variables] if meaning_of(name.lower()) == "rate"]


def _rate_of(target: Target) -> float:
    """Return the rate set by an option, or `RATE`. Raises UsageError unless a power of two."""
    values = target.arguments | dict(target.adaptation.variables)
    text = next((values[name] for name in _rates(target) if name in values), str(RATE))
    try:
        rate = float(text)
        if rate >= 1 and rate.hex().startswith("0x1.0000000000000p"):
            return rate
    except ValueError:
        pass
    raise UsageError(
        f"a learning rate of {text} for {target.spec!r} is not a power of two from 1, so "
        f"gradients cannot be derived exactly from its step; pass {RATE:g}, or nothing"
    )


def _refuse_more_than_a_step(target: Target, call: Callable[[], None], scene: Scene) -> None:
    """Raise UsageError if zero gradients move parameters by more than the rounding of an average
    over the ranks, which a parameter server may compute of equal values: W additions and a
    division. Raises ZeroGradientError if parameters become NaN or infinite, which is a defect of
    the code.
    """
    parameters = scene.parameters()
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    call()
    roundings = scene.value("world_size") + 1
    for parameter, kept in zip(parameters, before, strict=True):
        if not bool(kept.isfinite().all()):  # the training has failed already and reports that
            continue
        if not bool(parameter.isfinite().all()):
            raise ZeroGradientError(
                f"{target.spec!r} makes parameters NaN or infinite if a gradient is zero (for "
                "example of a layer that a batch does not use): look for a division by a norm or "
                "a maximum (0/0)"
            )
        bound = gamma(roundings, unit_roundoff(parameter.dtype)) * kept.double().abs()
        if not bool(((parameter.detach().double() - kept.double()).abs() <= bound).all()):
            raise UsageError(
                f"{target.spec!r} changes parameters even if every gradient is zero: by weight "
                "decay, momentum, or a gradient from an earlier step. Its gradients can be "
                "derived only from a plain SGD step; disable the rest, or split it in two and "
                "pass the part that synchronizes"
            )
