"""What is known of each communication backend, one file each.

A backend whose reduction order has been established offers `all_reduce_sum`; the others are
judged by bounds alone.
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def backend_names() -> list[str]:
    """The backends that distcheck can make a world of."""
    return sorted(found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]))


def all_reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """The backend's own order of summation, or None where it is not known."""
    module = importlib.import_module(f"{__name__}.{backend}")
    return getattr(module, "all_reduce_sum", None)
