"""Pins sources of nondeterminism in a process, so that runs show which of them a result depends on.

    seeds      global generators are seeded, and the system's random bytes and process ID are fixed
    clock      a clock advances by 10 ms each time it is read
    hashing    PYTHONHASHSEED is 0
    addresses  tensors and modules are hashed by their order instead of their address
    threads    a process computes with one thread
    workers    data loaders have no worker processes
    waiting    an asynchronous collective completes before it returns; so does a CUDA kernel
    operators  torch uses deterministic algorithms, and cuDNN does not benchmark
    memory     in addition, uninitialized memory is filled

Only code under test gets a pinned clock, random bytes or process ID: torch and Python itself, for
example in a timeout, do not. Code that reads a source is noted in a file, pinned or not. Does not
import torch before the script does.
"""

import functools
import itertools
import os
import random
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distcheck.machine.seeds import PINNED_ENVIRONMENT
from distcheck.worlds.callers import is_installed, is_tested_code

VARIABLE = "DISTCHECK_PINNED"  # the pinned sources; if it is set, all sources are noted
SOURCES = (
    "seeds", "clock", "hashing", "addresses", "threads", "workers", "waiting", "operators",
    "memory",
)  # fmt: skip
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_VARIABLES: Mapping[str, Mapping[str, str]] = {
    "hashing": {"PYTHONHASHSEED": "0"},
    "threads": {n: v for n, v in PINNED_ENVIRONMENT.items() if n != _WORKSPACE},
    "waiting": {"CUDA_LAUNCH_BLOCKING": "1"},
    "operators": {_WORKSPACE: PINNED_ENVIRONMENT[_WORKSPACE]},
    "memory": {_WORKSPACE: PINNED_ENVIRONMENT[_WORKSPACE]},
}
_CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_TICK_NS = 10_000_000
_PYTHONS = os.path.dirname(os.__file__) + os.sep
_PASSED_ON = {f"{_PYTHONS}{name}.py" for name in ("random", "secrets", "uuid")}  # read for a caller
_MOST_LINES = 16  # of a source
_pins = frozenset[str]()
_file = Path()
_noted: dict[str, set[str]] = {}
_ticks = itertools.count(1)


def variables_for(pins: Sequence[str]) -> dict[str, str]:
    """Return the environment of processes in which sources are noted, and `pins` are pinned."""
    found = {name: value for pin in pins for name, value in _VARIABLES.get(pin, {}).items()}
    return {**found, VARIABLE: ",".join(pins)}


def noted_lines(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the lines FILE:LINE that read a source, by source, over all processes of a run."""
    found: dict[str, dict[str, None]] = {}
    for file in sorted(folder.glob("read-*")):
        for entry in file.read_text(errors="backslashreplace").splitlines()[:1000]:
            source, _, line = entry.partition(" ")
            if source in SOURCES:
                found.setdefault(source, {})[line] = None
    return {source: tuple(lines) for source, lines in found.items()}


def begin(pins: str, folder: Path) -> None:
    """Pin what does not need torch, at the start of a process."""
    global _pins, _file
    _pins, _file = frozenset(pins.split(",")), folder / f"read-{os.getpid()}"
    for name in _CLOCKS:
        _replace("clock", time, name, lambda *_: next(_ticks) * _TICK_NS / 1e9)
        _replace("clock", time, f"{name}_ns", lambda *_: next(_ticks) * _TICK_NS)
    drawn = random.Random(0)
    _replace("seeds", os, "urandom", drawn.randbytes)
    _replace("seeds", random, "_urandom", drawn.randbytes)
    pid = 1000 + int(os.environ.get("RANK") or 0)
    _replace("seeds", os, "getpid", lambda: pid, own=True)
    seed = random.Random.seed

    def seeded(generator: random.Random, a: Any = None, version: int = 2) -> None:
        reads = a is None and _reads("seeds")
        seed(generator, 0 if reads else a, version)

    random.Random.seed = seeded  # type: ignore[assignment, method-assign]
    random.seed = random._inst.seed  # type: ignore[attr-defined]
    if "seeds" in _pins:
        random.seed(0)


def pin_torch() -> None:
    """Pin what needs torch, after it was imported."""
    import torch

    if "seeds" in _pins:
        torch.manual_seed(0)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(0)
    for module in (torch, torch.random):
        _replace("seeds", module, "seed", lambda: torch.manual_seed(0).initial_seed())
    if "addresses" in _pins:
        torch.Tensor.__hash__ = _order_of  # type: ignore[assignment, method-assign]
        torch.nn.Module.__hash__ = _order_of  # type: ignore[assignment, method-assign]
    if torch.get_num_threads() > 1:
        _note("threads", "")
    if "threads" in _pins:
        torch.set_num_threads(1)
    _replace("threads", torch, "set_num_threads", lambda _: None)
    _pin_workers(torch.utils.data.DataLoader)
    if torch.distributed.is_available():
        _pin_collectives(torch.distributed)
    if _pins & {"operators", "memory"}:
        _pin_operators()


def _pin_workers(loader: Any) -> None:
    original = loader.__init__

    @functools.wraps(original)
    def begin(one: Any, *args: Any, **kwargs: Any) -> None:
        original(one, *args, **kwargs)
        if one.num_workers and _reads("workers"):
            one.num_workers = 0

    loader.__init__ = begin


def _pin_collectives(distributed: Any) -> None:
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce",
                 "reduce_scatter", "reduce_scatter_tensor", "all_to_all_single"):  # fmt: skip
        call = getattr(distributed, name)

        def waiting(*args: Any, _call: Any = call, **kwargs: Any) -> Any:
            work = _call(*args, **kwargs)
            if work is not None and _reads("waiting"):
                work.wait()
            return work

        setattr(distributed, name, functools.wraps(call)(waiting))


def _pin_operators() -> None:
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = "memory" in _pins  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms = lambda *_, **__: None  # type: ignore[assignment]

    def pin(*_: Any) -> None:  # scripts set it after the import
        torch.backends.cudnn.benchmark = False

    torch.nn.modules.module.register_module_forward_pre_hook(pin)


_orders: dict[int, int] = {}
_next = itertools.count()


def _order_of(one: Any) -> int:
    """Return the number of objects that were hashed before this one."""
    key = id(one)
    if key not in _orders:
        _orders[key] = next(_next)
        weakref.finalize(one, _orders.pop, key, None)
    return _orders[key]


def _replace(
    source: str, owner: Any, name: str, pinned: Callable[..., Any], *, own: bool = False
) -> None:
    """Replace a function for code under test; with `own`, not for installed packages."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def read(*args: Any) -> Any:
        return pinned(*args) if _reads(source, own=own) else original(*args)

    setattr(owner, name, read)


def _reads(source: str, *, own: bool = False) -> bool:
    """Note the line if code under test reads a source now; return True if the source is pinned."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and file not in _PASSED_ON:
            if not is_tested_code(file) or (own and is_installed(file)):
                return False
            _note(source, f"{file}:{frame.f_lineno}")
            return source in _pins
        frame = frame.f_back
    return False


def _note(source: str, line: str) -> None:
    lines = _noted.setdefault(source, set())
    if line not in lines and len(lines) < _MOST_LINES:
        lines.add(line)
        number = os.open(_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(number, "w", errors="surrogateescape") as file:
            file.write(f"{source} {line}\n")
