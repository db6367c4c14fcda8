"""Patches the functions of torch that training scripts call, and forwards events to a listener.

A listener that raises is removed, and the job continues without it: `emit` is the only boundary
between distcheck and the script. Each patched function is documented by torch, or is called by
scripts under its public name. For data loaders, their iterators and fetchers are patched as well.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distcheck.job.inside.listener import ModuleListener, NullListener, OpListener
from distcheck.machine.compat import IterableFetcher, LoaderIterator, MapFetcher
from distcheck.training.leaf_hooks import watch_registrations

LOSSES = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div",
)  # fmt: skip
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "gather",
    "scatter", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "barrier", "broadcast_object_list", "all_gather_object",
)  # fmt: skip

# FSDP gathers parameters, which are not data; in torch 2.11 by the names that scripts use.
_OF_FSDP = f"{torch.distributed.__path__[0]}/fsdp"

_listener: NullListener | None = None
_ops: OpListener | None = None  # records operators
_on_defect: Callable[[], None] | None = None
heartbeat: Callable[[], None] = lambda: None  # noqa: E731 - says that the script goes on
_depth = 0  # nesting depth of model calls
_watching: ModuleListener | None = None  # modules of the model that is being called
_outermost: torch.optim.Optimizer | None = None  # the stepping optimizer; may call others' steps
# Names of functions that run now. Under a mode (such as torch.set_default_device) torch calls its
# function again by its public name; the script made only the outer call.
_running: set[str] = set()


def install(listener: NullListener, on_defect: Callable[[], None]) -> None:
    """Install the hooks, once per process."""
    global _listener, _on_defect
    _listener, _on_defect = listener, on_defect
    watch_registrations()
    _hook_modules()
    _hook_loaders()
    _hook_losses()
    _hook_backward()
    _hook_clipping()
    _hook_scalers()
    _hook_optimizers()
    _hook_collectives()
    _wrap(torch.autocast, "__enter__", after=lambda _, context: emit("autocasts", context))


def set_listener(listener: NullListener | None) -> None:
    """Replace the listener of this process, or remove it."""
    global _listener
    _listener = listener


def set_watched_modules(modules: ModuleListener | None) -> None:
    """Record the modules of the model that is about to be called, or stop."""
    global _watching
    _watching = modules


def log_ops(log: OpListener | None) -> None:
    """Record operators in a log from now on, or stop."""
    global _ops
    _ops = log


def _listening(part: str) -> AbstractContextManager[None]:
    """Return a context for a part of a step in which operators are recorded, if requested."""
    return contextlib.nullcontext() if _ops is None else _ops.hears(part)


def emit(what: str, *given: Any) -> Any:
    """Send an event to the listener; return None if there is none or it failed."""
    return guarded(_dispatch, what, *given)


def _dispatch(what: str, *given: Any) -> Any:
    heartbeat()  # also without a listener, since the job continues
    return None if _listener is None else getattr(_listener, what)(*given)


def guarded(call: Callable[..., Any], *given: Any) -> Any:
    """Call code of distcheck. If it raises, remove the listener and return None."""
    global _listener
    log, was_silent = _ops, _ops is not None and _ops.is_silent
    if log is not None:
        log.is_silent = True
    try:
        return call(*given)
    except Exception:
        has_failed, _listener = _listener is None, None
        if _on_defect is not None and not has_failed:
            _on_defect()
        return None
    finally:
        if log is not None:
            log.is_silent = was_silent


def _is_listening(module: torch.nn.Module) -> bool:
    if _listener is None or _depth or torch.compiler.is_compiling():
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    return bool(guarded(_has_parameters, module))


def _has_parameters(module: torch.nn.Module) -> bool:
    try:
        return next(iter(module.parameters()), None) is not None
    except ValueError:  # with a RemoteModule inside; its other modules are observed themselves
        return False


def _trains(module: torch.nn.Module) -> bool:
    trains = torch.is_grad_enabled() and module.training
    return trains and any(parameter.requires_grad for parameter in module.parameters())


def _hook_modules() -> None:
    original = torch.nn.Module.__call__

    @functools.wraps(original)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        global _depth
        if not _is_listening(module):
            return _call_watched_module(original, module, args, kwargs)
        trains = _trains(module)
        _depth += 1
        try:
            emit("enters" if trains else "evaluates", module, args, kwargs)
            with _listening("forward"):
                result = _call_watched_module(original, module, args, kwargs)
        finally:
            _depth -= 1
            set_watched_modules(None)
        if trains:
            emit("leaves", module, result)
        return result

    torch.nn.Module.__call__ = call  # type: ignore[method-assign, assignment]


def _call_watched_module(
    original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any
) -> Any:
    # First of all, so that compiled code depends on nothing else here.
    if torch.compiler.is_compiling() or _watching is None:
        return original(module, *args, **kwargs)
    watching = _watching
    call = guarded(watching.begins, module, args, kwargs)
    result = original(module, *args, **kwargs)
    if call is not None:
        guarded(watching.ends, call, result)
    return result


def _hook_loaders() -> None:
    from torch.utils.data import DataLoader

    advance, measure = LoaderIterator.__next__, DataLoader.__len__

    @functools.wraps(advance)
    def following(iterator: Any) -> Any:
        if emit("is_over", iterator):
            raise StopIteration
        batch = advance(iterator)
        emit("batch", iterator, batch)
        return batch

    @functools.wraps(measure)
    def length(loader: Any) -> int:
        own = measure(loader)
        replaced = emit("length", loader)
        return own if replaced is None else int(replaced)

    DataLoader.__len__ = length  # type: ignore[method-assign]
    LoaderIterator.__next__ = following  # type: ignore[method-assign, assignment]
    _wrap(
        DataLoader, "__iter__", lambda loader: emit("begins", loader),
        lambda iterator, loader: emit("iterates", loader, iterator),
    )  # fmt: skip
    for name in ("__init__", "_reset"):
        _wrap(LoaderIterator, name, after=lambda _, one, *__, **___: emit("samples_from", one))
    for kind in (MapFetcher, IterableFetcher):
        _wrap(kind, "fetch", lambda *_: emit("fetches"), lambda *_: emit("fetched"))


Heard = Callable[..., Any]


def _wrap(owner: Any, name: str, before: Heard | None = None, after: Heard | None = None) -> None:
    """Wrap a method: call `before` with its arguments, and `after` with its result and its
    arguments.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    setattr(owner, name, method)


def _hook_losses() -> None:
    for name in LOSSES:
        setattr(torch.nn.functional, name, _loss(name, getattr(torch.nn.functional, name)))


def _loss(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        computed = args[0] if args else kwargs.get("input")
        trains = isinstance(computed, torch.Tensor) and computed.requires_grad
        if _listener is None or _running or not trains or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        target = args[1] if len(args) > 1 else kwargs.get("target")
        emit("target", computed, target)
        with _listening("the loss"):
            value = _call_outermost(name, original, *args, **kwargs)
        ignored = kwargs.get("ignore_index", -100)
        emit("losses", name, str(kwargs.get("reduction", "mean")), target, ignored, value)
        return value

    return loss


def _call_outermost(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap a function that may call itself by its public name, so that only the outermost call is
    reported.
    """
    _running.add(name)
    try:
        return original(*args, **kwargs)
    finally:
        _running.discard(name)


def _hook_backward() -> None:
    original = torch.autograd.backward  # Tensor.backward calls it

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        global _depth
        if _running or _listener is None:
            original(tensors, *args, **kwargs)
            return
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        _depth += 1  # checkpointing recomputes parts: no pass of the script
        watching = _watching
        set_watched_modules(None)
        try:
            first = next((t for t in given[:1] if isinstance(t, torch.Tensor)), torch.empty(0))
            emit("backward", first)  # a pipeline stage passes a graph edge, which has no loss
            with _listening("backward"):
                _call_outermost("backward", original, given, *args, **kwargs)
        finally:
            _depth -= 1
            set_watched_modules(watching)
        emit("backward_over")

    torch.autograd.backward = backward


def _hook_clipping() -> None:
    for kind, home in (("norm", "clip_grad_norm_"), ("value", "clip_grad_value_")):
        replaced = _clipping(kind, getattr(torch.nn.utils, home))
        setattr(torch.nn.utils, home, replaced)
        setattr(torch.nn.utils.clip_grad, home, replaced)


def _clipping(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip(*args: Any, **kwargs: Any) -> Any:
        emit("gradients_ready")
        parameters = args[0] if args else kwargs.pop("parameters", ())
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        result = original(parameters, *args[1:], **kwargs)
        named = kwargs.get("max_norm" if kind == "norm" else "clip_value")
        emit("clipped", kind, args[1] if len(args) > 1 else named, result, parameters)
        return result

    return clip


def _hook_scalers() -> None:
    from torch.amp.grad_scaler import GradScaler

    _wrap(GradScaler, "scale", lambda scaler, *_, **__: emit("scales", scaler))
    _wrap(
        GradScaler, "unscale_", lambda *_, **__: emit("gradients_ready"),
        lambda _, scaler, optimizer: emit("unscales", optimizer),
    )  # fmt: skip
    _wrap(
        GradScaler, "step",
        lambda scaler, optimizer, *_, **__: emit("scaler_step", scaler, optimizer),
        lambda _, scaler, optimizer, *__, **___: emit("scaler_stepped", scaler, optimizer),
    )  # fmt: skip


def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    _wrap(
        torch.optim.Optimizer,
        "add_param_group",
        after=lambda _, one, *__, **___: emit("makes", one),
    )


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    global _outermost
    if _outermost not in (None, optimizer):
        return None
    _outermost = optimizer
    closure = kwargs.get("closure") or next(iter(args[1:2]), None)
    if not callable(closure):
        emit("gradients_ready")
        emit("steps", optimizer)
        return None

    @functools.wraps(closure)
    def called(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        emit("gradients_ready")
        emit("steps", optimizer)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": called}
    return (args[0], called, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    global _outermost
    if optimizer is _outermost:
        _outermost = None
        emit("stepped", optimizer)


def _hook_collectives() -> None:
    if not torch.distributed.is_available():
        return
    for name in COLLECTIVES:
        if original := getattr(torch.distributed, name, None):
            replaced = _collective(name, original)
            for module in (torch.distributed, torch.distributed.distributed_c10d):
                setattr(module, name, replaced)


def _collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if _listener is not None and not frame.f_code.co_filename.startswith(_OF_FSDP):
            emit("collective", name, f"{frame.f_code.co_filename}:{frame.f_lineno}", (args, kwargs))
        return original(*args, **kwargs)

    return call
