"""torch's flight recorder: the collectives that this process has entered.

It works for gloo on CPU as well, where TORCH_FR_BUFFER_SIZE is set; empty where torch has none.
"""

import contextlib
import importlib
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def entries(*, stacks: bool = True) -> list[dict[str, Any]]:
    """What was recorded, oldest first; with the Python frames of each call, which take longer."""
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        with _without_inductor():
            dumped = c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=stacks)
            found: dict[str, Any] = pickle.loads(dumped)
    except (ImportError, AttributeError, RuntimeError, TypeError):
        return []
    recorded: list[dict[str, Any]] = found.get("entries", [])
    return recorded


def name_of(entry: dict[str, Any]) -> str:
    """The collective's name: "all_reduce"."""
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def is_open(entry: dict[str, Any]) -> bool:
    """Whether a collective has not been seen to complete."""
    return not entry.get("retired") and entry.get("state") != "completed"


@contextlib.contextmanager
def _without_inductor() -> Iterator[None]:
    """The recorder asks torch._inductor about frames, if torch has it; and torch, asked, imports
    it, for seconds. Code that has not imported it has no frames of its either.
    """
    torch = sys.modules.get("torch")
    if torch is None or "torch._inductor" in sys.modules:
        yield
        return
    torch.__dict__["_inductor"] = SimpleNamespace()
    try:
        yield
    finally:
        torch.__dict__.pop("_inductor", None)
