"""A function that writes its own plain SGD step into the parameters after it has synchronized.

Its gradients are taken from what it writes: (before - after) / lr. That subtraction loses most of
a gradient's digits beside parameters of ordinary size: after is rounded to u |after|, which is
u |after| / lr in the gradient. So the code is given parameters of zero, and a learning rate of a
power of two: what it then leaves is -lr times its gradient, and dividing that by lr is exact (a
product with 32 neither rounds nor falls below the smallest number; it overflows only where the
gradient is within a factor of 32 of the largest). Nothing is widened, every layer judges as usual.

Code that calls optimizer.step() on one rank for all, as a server does that sends parameters, is
given an optimizer of plain SGD with that rate in the same way (`--as steps-inside`).

That holds for updates that add a multiple of this step's gradient to a parameter, whatever the
parameter is. After the last step the code is called once more, with the parameters as they are and
gradients of zero: code that moves them then decays them, or keeps momentum, and is refused.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.machine.numerics import gamma, unit_roundoff
from distcheck.training.adapters.answers import wait_for
from distcheck.training.adapters.names import meaning_of
from distcheck.training.adapters.refusals import refusal
from distcheck.training.adapters.scene import Filling, Scene
from distcheck.training.adapters.target import Target
from distcheck.training.loaded import LoadedStrategy

RATE = 32.0


class ZeroGradientError(ArithmeticError):
    """Code that divides zero by zero where a gradient is zero."""


def fits(target: Target) -> bool:
    """A function that subtracts from parameters' data, and whose learning rate can be given."""
    is_function = target.is_function and not target.is_unbound
    return is_function and target.source.descends and bool(_rates(target))


def adapt(target: Target, scene: Scene) -> LoadedStrategy:
    """Called after backward on parameters of zero; the optimizer's step is the workload's own."""
    if target.is_class or target.is_unbound or not target.first:
        raise refusal(
            target, f"strategy {target.spec!r} is not a function of a model or of parameters"
        )
    takes_optimizer = any(meaning_of(p.name) == "optimizer" for p in target.parameters)
    if not _rates(target) and not takes_optimizer:
        raise refusal(
            target,
            f"{target.described}: gradients are derived from its step by dividing by the learning "
            "rate, which is not known; make it a parameter lr, or give its name in the module with "
            f"--set lr={RATE:g}",
        )
    scene.rate = rate = _rate_of(target)
    supplied = [target.first] if meaning_of(target.first) in ("", "model") else []
    filling = Filling(
        scene, target.value, what=target.described, supplied=supplied, also=_rates(target)
    )

    def call() -> None:
        with _plain_sgd(scene) if takes_optimizer else contextlib.nullcontext():
            wait_for(filling.call(*([scene.live_model] if supplied else [])))

    sync, close = take_gradients(target, scene, call, rate)
    return target.loaded(
        f"{target.signature}, which takes the step as well: gradients are its update of "
        f"parameters of zero, divided by a learning rate of {rate:g}; the step is the workload's",
        sync=sync,
        close=close,
    )


def take_gradients(
    target: Target, scene: Scene, call: Callable[[], None], rate: float
) -> tuple[Callable[[nn.Module, Step], None], Callable[[], None]]:
    """A strategy's `sync` and `close` around a call that takes the step of plain SGD."""

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
                    f"{target.spec!r} was taken to write its own step into the parameters, and "
                    f"wrote none where they are zero; --as says otherwise"
                )
            for parameter, kept in zip(parameters, before, strict=True):
                gradient = parameter.detach().neg() / rate
                absent = not any(parameter is p for p in stepped) and not bool(gradient.any())
                parameter.copy_(kept)
                parameter.grad = None if absent else gradient

    return sync, lambda: _refuse_more_than_a_step(target, call, scene)


@contextlib.contextmanager
def _plain_sgd(scene: Scene) -> Iterator[None]:
    """Makes the code find plain SGD where it asks for the optimizer."""
    kept = scene.optimizer
    scene.optimizer = torch.optim.SGD(scene.parameters(), lr=scene.rate or RATE)
    try:
        yield
    finally:
        scene.optimizer = kept


def _rates(target: Target) -> list[str]:
    """The names by which the code takes its learning rate."""
    variables = [name for name, _ in target.adaptation.variables]
    taken = [p.name for p in target.parameters]
    return [name for name in [*taken, *variables] if meaning_of(name.lower()) == "rate"]


def _rate_of(target: Target) -> float:
    """The rate that an option gives, or else `RATE`. Raises UsageError for anything but a power of
    two.
    """
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
        f"gradients cannot be derived exactly from its step; give {RATE:g}, or nothing"
    )


def _refuse_more_than_a_step(target: Target, call: Callable[[], None], scene: Scene) -> None:
    """Raises UsageError where gradients of zero move parameters by more than an average over the
    ranks, which a parameter server may take of equal numbers, can round: W additions, a division;
    ZeroGradientError where they become no numbers, which is a defect of the code and no other form.
    """
    parameters = scene.parameters()
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    call()
    roundings = scene.value("world_size") + 1
    for parameter, kept in zip(parameters, before, strict=True):
        if not bool(kept.isfinite().all()):  # the training has failed by then, and says so
            continue
        if not bool(parameter.isfinite().all()):
            raise ZeroGradientError(
                f"{target.spec!r} makes parameters NaN or infinite where a gradient is zero, as "
                "that of a layer is which a batch does not use: look for a division by a norm or a "
                "maximum (0/0)"
            )
        bound = gamma(roundings, unit_roundoff(parameter.dtype)) * kept.double().abs()
        if not bool(((parameter.detach().double() - kept.double()).abs() <= bound).all()):
            raise UsageError(
                f"{target.spec!r} moves parameters also where every gradient is zero: by weight "
                "decay, momentum, or a gradient that it keeps from an earlier step. Its gradients "
                "can be taken from its step only where that is plain SGD; switch the rest off, or "
                "split it in two and give the part that synchronizes"
            )
