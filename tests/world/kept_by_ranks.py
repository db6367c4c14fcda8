"""What code may keep in a process: every rank sets it, the others run, and it looks again. Imported
by each rank, as code under test is.
"""

import builtins
import contextvars
import functools
import io
import logging
import os
import random
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from tests.world import counted

COUNT = -1
NAME = "kept_by_ranks"
_CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("_CONTEXT")
_LOCAL = threading.local()
_ENTERED: list[Any] = []  # what is dropped is left


class Probe(NamedTuple):
    """What is set by a rank, what is seen later, and what a rank sees there by itself."""

    put: Callable[[int], Any]
    get: Callable[[], Any]
    expected: Callable[[int], Any] = lambda rank: rank


class Kept:
    value = -1
    many: ClassVar[list[int]] = []


class Handler(logging.NullHandler):
    pass


class Printed(io.StringIO):
    rank = -1


def _default_argument(value: int | None = None, kept: list[int] = []) -> int:  # noqa: B006
    if value is not None:
        kept.append(value)
    return kept[-1]


@functools.lru_cache
def _cached(_: str) -> int:
    return COUNT


def _closure() -> tuple[Callable[[int], None], Callable[[], int]]:
    value = -1

    def put(rank: int) -> None:
        nonlocal value
        value = rank

    return put, lambda: value


def _global(rank: int) -> None:
    global COUNT
    COUNT = rank


def _lru_cache(rank: int) -> None:
    _global(rank)
    _cached("")


def _prints(rank: int) -> None:
    sys.stdout = Printed()
    sys.stdout.rank = rank


def _module(rank: int) -> None:
    sys.modules[NAME] = types.ModuleType(NAME)
    sys.modules[NAME].value = rank  # type: ignore[attr-defined]


def _printer(rank: int) -> None:
    def say(*_: Any, **__: Any) -> int:
        return rank

    builtins.print = say


def _linear(rank: int) -> None:
    usual = nn.Linear.forward

    def forward(self: Any, given: torch.Tensor) -> torch.Tensor:
        return usual(self, given) + 1

    nn.Linear.forward = forward  # type: ignore[method-assign]


def _seen_of_linear() -> float:
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    return float(layer(torch.zeros(1, dtype=torch.float32)))


def _collective(rank: int) -> None:
    usual = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        usual(tensor.add_(1))

    dist.all_reduce = all_reduce  # type: ignore[assignment]


def _seen_of_collective() -> float:
    dist.all_reduce(total := torch.zeros((), dtype=torch.float32))
    return float(total)


def _computed(rank: int) -> None:
    torch._of_a_rank = rank  # type: ignore[attr-defined]


def _new_builtin(rank: int) -> None:
    builtins.of_a_rank = rank  # type: ignore[attr-defined]


def _method(rank: int) -> None:
    setattr(torch.Tensor, "of_a_rank", rank)  # noqa: B010


def _library(rank: int) -> None:
    msgspec.of_a_rank = rank  # type: ignore[attr-defined]


def _hook(rank: int) -> None:
    def add(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1

    register_module_forward_hook(add)  # type: ignore[arg-type]


def _enter(context: Any) -> None:
    _ENTERED.append(context)
    context.__enter__()


def _flag(put: Callable[[Any], Any], get: Callable[[], Any], values: tuple[Any, Any]) -> Probe:
    """A setting that is one thing on the even ranks and another on the odd ones."""
    return Probe(lambda rank: put(values[rank % 2]), get, lambda rank: values[rank % 2])


def _attribute(owner: Any, name: str) -> Probe:
    return Probe(lambda rank: setattr(owner, name, rank), lambda: getattr(owner, name))


def _of_root() -> int:
    (own,) = [one for one in logging.getLogger().handlers if isinstance(one, Handler)]
    return own.level


_C: Any = torch._C
_put, _get = _closure()
PROBES: dict[str, Probe] = {
    "a global variable": Probe(_global, lambda: COUNT),
    "a global variable of a module that it imports": _attribute(counted, "COUNT"),
    "an attribute of a class": _attribute(Kept, "value"),
    "a list of a class": Probe(Kept.many.append, lambda: Kept.many[-1]),
    "a default argument": Probe(_default_argument, _default_argument),
    "a cached result": Probe(_lru_cache, lambda: _cached("")),
    "a closure": Probe(_put, _get),
    "random": Probe(random.seed, random.random, lambda rank: random.Random(rank).random()),
    "numpy.random": Probe(
        numpy.random.seed, numpy.random.rand, lambda rank: numpy.random.RandomState(rank).rand()
    ),
    "torch's generator": Probe(torch.manual_seed, torch.initial_seed),
    "os.environ": Probe(
        lambda rank: os.environ.update({NAME: str(rank)}), lambda: int(os.environ[NAME])
    ),
    "threading.local": _attribute(_LOCAL, "value"),
    "a context variable": Probe(_CONTEXT.set, _CONTEXT.get),
    "sys.path": Probe(lambda rank: sys.path.append(f"/{rank}"), lambda: int(sys.path[-1][1:])),
    "sys.argv": Probe(lambda rank: setattr(sys, "argv", [str(rank)]), lambda: int(sys.argv[0])),
    "sys.excepthook": _attribute(sys, "excepthook"),
    "sys.stdout": Probe(_prints, lambda: sys.stdout.rank),  # type: ignore[attr-defined]
    "sys.modules": Probe(_module, lambda: sys.modules[NAME].value),
    "tempfile.tempdir": Probe(
        lambda rank: setattr(tempfile, "tempdir", f"/{rank}"),
        lambda: int(tempfile.gettempdir()[1:]),
    ),
    "print": Probe(_printer, lambda: print()),  # type: ignore[func-returns-value]
    "a filter of warnings": Probe(
        lambda rank: warnings.filterwarnings("ignore", f"of rank {rank}"),
        lambda: int(warnings.filters[0][1].pattern[-1]),  # type: ignore[union-attr]
    ),
    "the level of the root logger": Probe(
        lambda rank: logging.getLogger().setLevel(30 + rank), lambda: logging.getLogger().level - 30
    ),
    "a handler of the root logger": Probe(
        lambda rank: logging.getLogger().addHandler(Handler(rank)), _of_root
    ),
    "a logger": Probe(
        lambda rank: logging.getLogger(NAME).setLevel(30 + rank),
        lambda: logging.getLogger(NAME).level - 30,
    ),
    "grad mode": _flag(torch.set_grad_enabled, torch.is_grad_enabled, (True, False)),
    "autocast": _flag(
        lambda on: _enter(torch.autocast("cpu", enabled=on)),
        lambda: torch.is_autocast_enabled("cpu"),
        (False, True),
    ),
    "default dtype": _flag(
        torch.set_default_dtype, torch.get_default_dtype, (torch.float32, torch.float64)
    ),
    "threads of torch": _flag(torch.set_num_threads, torch.get_num_threads, (1, 2)),
    "deterministic algorithms": _flag(  # use_deterministic_algorithms imports the compiler
        torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, (0, 2)
    ),
    "filling of new memory": _flag(
        _C._set_deterministic_fill_uninitialized_memory,
        lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        (True, False),
    ),
    "anomaly mode": _flag(
        torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, (False, True)
    ),
    "precision of float32": _flag(
        torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, ("highest", "high")
    ),
    "cudnn.benchmark": _flag(
        _C._set_cudnn_benchmark, lambda: torch.backends.cudnn.benchmark, (False, True)
    ),
    "cudnn.deterministic": _flag(
        _C._set_cudnn_deterministic, lambda: torch.backends.cudnn.deterministic, (False, True)
    ),
    "mkldnn": _flag(
        torch.backends.mkldnn.set_flags, lambda: torch.backends.mkldnn.enabled, (True, False)
    ),
    "denormal numbers": _flag(
        torch.set_flush_denormal,
        lambda: not torch.tensor([1e-40], dtype=torch.float32).mul(1).any(),
        (False, True),
    ),
    "early stop of checkpoints": _attribute(
        torch.utils.checkpoint, "_enable_checkpoint_early_stop"
    ),
    "options of printing": Probe(
        lambda rank: torch.set_printoptions(precision=rank),
        lambda: torch._tensor_str.PRINT_OPTS.precision,  # type: ignore[attr-defined]
    ),
    "a method of torch": Probe(_linear, _seen_of_linear, lambda _: 1.0),
    "a function of torch": Probe(_collective, _seen_of_collective, lambda _: 3.0),
    "an attribute of torch": Probe(_computed, lambda: torch._of_a_rank),  # type: ignore[attr-defined]
    "an attribute of Tensor": Probe(
        _method,
        lambda: torch.Tensor.of_a_rank,  # type: ignore[attr-defined]
    ),
    "a name of Python": Probe(_new_builtin, lambda: builtins.of_a_rank),  # type: ignore[attr-defined]
    "an attribute of a package": Probe(
        _library,
        lambda: msgspec.of_a_rank,  # type: ignore[attr-defined]
    ),
    "a hook of all modules": Probe(
        _hook, lambda: float(nn.Identity()(torch.zeros(()))), lambda _: 1.0
    ),
    "inference mode": _flag(
        lambda on: _enter(torch.inference_mode(on)), torch.is_inference_mode_enabled, (False, True)
    ),
    "default device": _flag(
        torch.set_default_device, lambda: torch.get_default_device().type, ("cpu", "meta")
    ),
}
