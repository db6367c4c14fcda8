"""Begins a guard, and has all that run check once more when the script takes its groups apart."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distcheck.errors import UsageError
from distcheck.job.guard.audit import Audit
from distcheck.job.guard.guarding import Guard
from distcheck.job.guard.watched import Finder, WatchedModel

_ending: list["weakref.ref[Guard]"] = []


@functools.cache
def _check_at_the_end() -> None:
    """Has every guard check once more before the script takes its groups apart."""
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            for guard in [one for ref in _ending if (one := ref()) is not None]:
                guard.finish()
                guard.close()  # its own group would go on, and wait for ranks that do not
        destroy(group)

    for module in (dist, dist.distributed_c10d):
        setattr(module, "destroy_process_group", destroy_process_group)  # noqa: B010


def start(
    optimizer: Any,
    *,
    every: int,
    action: Any,
    model: torch.nn.Module | None,
    watched: WatchedModel | None = None,
    hears: bool = True,
    audit: bool | str = False,
    **about: Any,
) -> Guard:
    """Checks what was given, and begins. Raises UsageError."""
    optimizer = _inner_of(optimizer)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every must be a whole number of at least 1, not {every!r}")
    if not callable(action) and action not in ("raise", "warn"):
        raise UsageError(f'on_difference must be "raise", "warn" or a function, not {action!r}')
    if model is not None and not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    audits = Audit(optimizer, _wire_of(audit)) if audit else None
    finder = None
    if watched is None and model is not None:
        watched = WatchedModel(model)
    elif watched is None:
        finder = Finder(functools.partial(has_parameters_of, weakref.ref(optimizer)))
    try:
        guard = Guard(
            optimizer, every=every, action=action, watched=watched, finder=finder, audit=audits,
            **about,
        )  # fmt: skip
    except BaseException:  # or hooks stay that cannot be taken out
        for part in (finder, watched, audits):
            if part is not None:
                part.close()
        raise
    _ending.append(weakref.ref(guard))
    _check_at_the_end()
    return guard.begin(hears=hears)


def _wire_of(audit: bool | str) -> torch.dtype | None:
    if isinstance(audit, bool):
        return None
    if audit not in ("bfloat16", "float16"):
        raise UsageError(f'audit must be True, "bfloat16" or "float16", not {audit!r}')
    return getattr(torch, audit)  # type: ignore[no-any-return]


def has_parameters_of(
    optimizer: Callable[[], torch.optim.Optimizer | None], module: torch.nn.Module
) -> bool:
    """Whether an optimizer, if it is still there, trains a parameter of the module."""
    there = optimizer()
    if there is None:
        return False
    own = {id(p) for group in there.param_groups for p in group["params"]}
    return any(id(p) in own for p in module.parameters())


def _inner_of(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside those that accelerate and Fabric put around it."""
    seen = 0
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer, seen = inner, seen + 1
        if seen > 8:
            break
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"guard takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    return optimizer
