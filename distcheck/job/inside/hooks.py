"""The places in torch where every training script passes, and what a listener hears there.

A listener that raises is dropped, and the job goes on as if nothing listened. Each place is one
that torch documents, or a function that scripts call by its public name.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "barrier", "broadcast_object_list", "all_gather_object",
)  # fmt: skip


class Listener(Protocol):
    """What hears of a training script. Those that return something may replace it."""

    def iterates(self, loader: Any, iterator: Any) -> None:
        """A pass over a data loader begins."""

    def batch(self, iterator: Any, batch: Any) -> Any:
        """A data loader hands out a batch."""

    def is_over(self, iterator: Any) -> bool | None:
        """Whether a data loader is to hand out nothing more."""

    def length(self, loader: Any) -> int | None:
        """How many batches a data loader is to have; None: its own number."""

    def enters(self, model: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The outermost model is called, in training."""

    def leaves(self, model: torch.nn.Module) -> None:
        """That call is over."""

    def target(self, name: str, target: Any) -> Any:
        """A loss of torch's is called with a target."""

    def losses(self, name: str, reduction: str, target: Any, ignored: int, value: Any) -> None:
        """It has returned."""

    def backward(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""

    def backward_over(self) -> None:
        """It is over."""

    def gradients_ready(self) -> None:
        """Something is about to use the gradients: clipping, unscaling or a step."""

    def clipped(self, kind: str, most: float, norm: Any) -> None:
        """Gradients were clipped."""

    def scales(self, scaler: Any) -> None:
        """A GradScaler is about to scale a loss."""

    def scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """A GradScaler is asked for a step."""

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        """It has made the step, or has skipped it."""

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""

    def collective(self, name: str, place: str) -> None:
        """Python code calls a collective."""


_listener: Listener | None = None
_on_defect: Callable[[], None] | None = None
_depth = 0  # of models that are being called
_stepping = 0  # optimizers around another call its step
# Names of functions that run now. torch calls its own function again, by its public name, where a
# mode is on (torch.set_default_device is one); the script has made only the outer call.
_running: set[str] = set()
_has_parameters: "weakref.WeakKeyDictionary[torch.nn.Module, bool]" = weakref.WeakKeyDictionary()


def install(listener: Listener, on_defect: Callable[[], None]) -> None:
    """Puts the hooks in, once a process."""
    global _listener, _on_defect
    _listener, _on_defect = listener, on_defect
    _hook_modules()
    _hook_loaders()
    _hook_losses()
    _hook_backward()
    _hook_clipping()
    _hook_scalers()
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _hook_collectives()


def _say(what: str, *given: Any) -> Any:
    """Calls the listener, if there is one; None where there is none, or it failed."""
    global _listener
    if _listener is None:
        return None
    try:
        return getattr(_listener, what)(*given)
    except Exception:
        _listener = None
        if _on_defect is not None:
            _on_defect()
        return None


def _trains(module: torch.nn.Module) -> bool:
    if _listener is None or not module.training or not torch.is_grad_enabled():
        return False
    if module not in _has_parameters:
        _has_parameters[module] = any(p.requires_grad for p in module.parameters())
    return _has_parameters[module]


def _hook_modules() -> None:
    original = torch.nn.Module.__call__

    @functools.wraps(original)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if _depth or torch.compiler.is_compiling() or not _trains(module):
            return original(module, *args, **kwargs)
        _depth += 1
        try:
            args, kwargs = _say("enters", module, args, kwargs) or (args, kwargs)
            result = original(module, *args, **kwargs)
        finally:
            _depth -= 1
        _say("leaves", module)
        return result

    torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]


def _hook_loaders() -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    begin, advance = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    measure = DataLoader.__len__

    @functools.wraps(begin)
    def iterate(loader: Any) -> Any:
        iterator = begin(loader)
        _say("iterates", loader, iterator)
        return iterator

    @functools.wraps(advance)
    def following(iterator: Any) -> Any:
        if _say("is_over", iterator):
            raise StopIteration
        batch = advance(iterator)
        replaced = _say("batch", iterator, batch)
        return batch if replaced is None else replaced

    @functools.wraps(measure)
    def length(loader: Any) -> int:
        own = measure(loader)
        replaced = _say("length", loader)
        return own if replaced is None else int(replaced)

    DataLoader.__len__ = length  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate  # type: ignore[method-assign, assignment]
    _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign, assignment]


def _hook_losses() -> None:
    for name in LOSSES:
        setattr(torch.nn.functional, name, _loss(name, getattr(torch.nn.functional, name)))


def _loss(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
        is_own = _listener is not None and torch.is_grad_enabled() and not _running
        if not is_own or not input.requires_grad:
            return original(input, *args, **kwargs)
        target = args[0] if args else kwargs.get("target")
        replaced = _say("target", name, target)
        if replaced is not None:
            target = replaced
            if args:
                args = (target, *args[1:])
            else:
                kwargs["target"] = target
        value = _once(name, original, input, *args, **kwargs)
        ignored = kwargs.get("ignore_index", -100)
        _say("losses", name, str(kwargs.get("reduction", "mean")), target, ignored, value)
        return value

    return loss


def _once(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function that may call itself by its public name."""
    _running.add(name)
    try:
        return original(*args, **kwargs)
    finally:
        _running.discard(name)


def _hook_backward() -> None:
    original = torch.Tensor.backward

    @functools.wraps(original)
    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        global _depth
        if _running:
            original(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            return
        _depth += 1  # activation checkpoints call parts of the model again: no pass of the script
        try:
            _say("backward", tensor)
            _once("backward", original, tensor, *args, **kwargs)
        finally:
            _depth -= 1
        _say("backward_over")

    torch.Tensor.backward = backward  # type: ignore[method-assign, assignment]


def _hook_clipping() -> None:
    for kind, home in (("norm", "clip_grad_norm_"), ("value", "clip_grad_value_")):
        replaced = _clipping(kind, getattr(torch.nn.utils, home))
        setattr(torch.nn.utils, home, replaced)
        setattr(torch.nn.utils.clip_grad, home, replaced)


def _clipping(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        _say("gradients_ready")
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        result = original(parameters, *args, **kwargs)
        most = args[0] if args else next(iter(kwargs.values()), float("nan"))
        _say("clipped", kind, most, result)
        return result

    return clip


def _hook_scalers() -> None:
    from torch.amp.grad_scaler import GradScaler

    unscale, step, scale = GradScaler.unscale_, GradScaler.step, GradScaler.scale

    @functools.wraps(scale)
    def scaling(scaler: Any, outputs: Any) -> Any:
        _say("scales", scaler)
        return scale(scaler, outputs)

    @functools.wraps(unscale)
    def unscaling(scaler: Any, optimizer: Any) -> None:
        _say("gradients_ready")
        unscale(scaler, optimizer)

    @functools.wraps(step)
    def stepping(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _say("scaler_step", scaler, optimizer)
        result = step(scaler, optimizer, *args, **kwargs)
        _say("scaler_stepped", scaler, optimizer)
        return result

    GradScaler.scale = scaling  # type: ignore[method-assign, assignment]
    GradScaler.unscale_ = unscaling  # type: ignore[method-assign, assignment]
    GradScaler.step = stepping  # type: ignore[method-assign, assignment]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _stepping
    _stepping += 1
    if _stepping == 1:
        _say("gradients_ready")
        _say("steps", optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _stepping
    _stepping -= 1
    if _stepping == 0:
        _say("stepped", optimizer)


def _hook_collectives() -> None:
    if not torch.distributed.is_available():
        return
    for name in COLLECTIVES:
        original = getattr(torch.distributed, name, None)
        if original is not None:
            replaced = _collective(name, original)
            setattr(torch.distributed, name, replaced)
            if hasattr(torch.distributed.distributed_c10d, name):
                setattr(torch.distributed.distributed_c10d, name, replaced)


def _collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _listener is not None:
            frame = sys._getframe(1)
            _say("collective", name, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return original(*args, **kwargs)

    return call
