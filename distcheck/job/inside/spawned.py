"""A script that starts its ranks itself, as one process: its first rank runs in its own."""

import dataclasses
import multiprocessing.process
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch.multiprocessing

_COUNTS = re.compile(r"world|n?proc|gpu|rank|device", re.IGNORECASE)


def install(world: int) -> None:
    """Makes what starts ranks, as many as a `world` has, run the first of them here."""
    spawning: Any = torch.multiprocessing

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> Any:
        fn(0, *of_one(tuple(args), world))
        return SimpleNamespace(join=lambda *_: True, pids=list, processes=[])

    for module in (spawning, spawning.spawn if hasattr(spawning.spawn, "spawn") else spawning):
        module.spawn = module.start_processes = spawn

    def start(process: Any) -> None:
        process._target(*of_one(process._args, world), **of_one(process._kwargs, world))

    multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign, assignment]


def of_one(value: Any, world: int) -> Any:
    """Arguments of a rank in which numbers of ranks are one: whole numbers that are as many, and
    attributes with such a name.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return 1 if value == world else value
    if isinstance(value, tuple):
        return tuple(of_one(one, world) for one in value)
    if isinstance(value, Mapping):
        return {
            key: of_one(one, world) if _COUNTS.search(str(key)) else one
            for key, one in value.items()
        }
    if isinstance(value, Namespace) or dataclasses.is_dataclass(value):
        for name, one in list(vars(value).items()):
            if _COUNTS.search(name) and type(one) is int and one == world:
                setattr(value, name, 1)
    return value
