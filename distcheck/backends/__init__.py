"""What is known of each communication backend, one file or folder each. Importing one imports no
torch. It may offer

    all_reduce_sum(shards)   its reduction order, where that has been established; the others are
                             judged by bounds alone
    reduce_sum(shards)       the order of a reduce to one rank
    missing() -> str         why it cannot run here
    register() -> str        makes torch know it, in a rank; returns the name that torch knows it by
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean

if TYPE_CHECKING:
    import torch


def backend_names() -> list[str]:
    """The backends that distcheck can make a world of."""
    return sorted(found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)]))


def check_name(backend: str) -> None:
    """Raises UsageError for a name that no backend has; it says which can run here."""
    known = backend_names()
    if backend in known:
        return
    here = [name for name in known if not missing(name)]
    raise UsageError(
        f"unknown backend {backend!r}{did_you_mean(backend, known)}; known are {', '.join(known)}; "
        f"{', '.join(here) or 'none of them'} can run here"
    )


def all_reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """The backend's own order of summation, or None where it is not known."""
    return getattr(_module(backend), "all_reduce_sum", None)


def reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """The order in which the backend's reduce to any one rank adds, or None: not known."""
    return getattr(_module(backend), "reduce_sum", None)


def missing(backend: str) -> str:
    """Why a backend cannot run on this machine, in a sentence that says what to install; empty
    where it can, as far as can be known without torch.
    """
    ask: Callable[[], str] | None = getattr(_module(backend), "missing", None)
    return ask() if ask is not None else ""


def register(backend: str) -> str:
    """Makes torch know a backend, in a rank, before `init_process_group`; returns the name to give
    it. Raises CannotRunError where its library cannot be loaded.
    """
    do: Callable[[], str] | None = getattr(_module(backend), "register", None)
    return do() if do is not None else backend


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{backend}")
