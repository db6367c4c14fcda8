"""What is known of each communication backend, one file or folder each. Importing one imports no
torch. It may offer

    all_reduce_sum(shards)   its reduction order, where that has been established; the others are
                             judged by bounds alone
    reduce_sum(shards)       the order of a reduce to one rank
    ORDERS, sum_in(order, collective)
                             the orders that may follow its name and a colon (`simulated:tree`), in
                             place of these two
    missing() -> str         why it cannot run here
    missing_for(ranks) -> str
                             why so many ranks cannot run on this machine; it may import torch
    variables(ranks) -> dict[str, str]
                             what so many ranks on one machine need in their environment
    register() -> str        makes torch know it, in a rank; returns the name that torch knows it by
    note_calls(name)         records this process's calls, if torch, which knows the backend by
                             `name`, has no record of them
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distcheck import registry
from distcheck.errors import UsageError
from distcheck.errors.spelling import did_you_mean

if TYPE_CHECKING:
    import torch


def backend_names() -> list[str]:
    """The backends that distcheck can make a world of."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    added = filter(registry.is_installed, registry.BACKENDS)
    return sorted({*added, *(name for name in found if not name.startswith("_"))})


def check_name(backend: str) -> None:
    """Raises UsageError for a name that no backend has; it says which can run here."""
    known = backend_names()
    name, colon, order = backend.partition(":")
    if name in registry.BACKENDS and name not in known:
        registry.load(name)  # raises: it is not installed
    if name in known and not colon:
        return
    if name in known and (orders := _orders(name)):
        if order in orders:
            return
        raise UsageError(
            f"unknown order {order!r} of backend {name}{did_you_mean(order, orders)}; known are "
            f"{', '.join(orders)}"
        )
    here = [name for name in known if not missing(name)]
    raise UsageError(
        f"unknown backend {backend!r}{did_you_mean(backend, known)}; known are {', '.join(known)}; "
        f"{', '.join(here) or 'none of them'} can run here"
    )


def name_of(backend: str) -> str:
    """A backend's name, without the order that may follow it: "simulated" of "simulated:tree"."""
    return backend.partition(":")[0]


def order_of(backend: str) -> str:
    """The order in which a backend that has several was asked to add; its first, unless given."""
    order = backend.partition(":")[2]
    return order or next(iter(_orders(name_of(backend))), "")


def names_with_orders() -> list[str]:
    """All that `--backend` takes."""
    names = backend_names()
    return names + [f"{name}:{order}" for name in names for order in _orders(name)]


def is_known(backend: str) -> bool:
    """Whether it is distcheck's own: a name, with or without one of its orders."""
    return backend in names_with_orders()


def _orders(name: str) -> tuple[str, ...]:
    return getattr(_module(name), "ORDERS", ())


def all_reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """The backend's own order of summation, or None where it is not known."""
    return _sum_of(backend, "all_reduce")


def reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """The order in which the backend's reduce to any one rank adds, or None: not known."""
    return _sum_of(backend, "reduce")


def _sum_of(backend: str, collective: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    module = _module(name_of(backend))
    if hasattr(module, "sum_in"):
        found: Callable[[list[torch.Tensor]], torch.Tensor] = module.sum_in(
            order_of(backend), collective
        )
        return found
    return getattr(module, f"{collective}_sum", None)


def missing(backend: str) -> str:
    """Why a backend cannot run on this machine, in a sentence that says what to install; empty
    where it can, as far as can be known without torch.
    """
    if name_of(backend) in registry.BACKENDS and not registry.is_installed(name_of(backend)):
        return f"the add-on {name_of(backend)!r} is not installed; reinstall distcheck"
    ask: Callable[[], str] | None = getattr(_module(name_of(backend)), "missing", None)
    return ask() if ask is not None else ""


def missing_for(backend: str, ranks: int) -> str:
    """Why a backend cannot run so many ranks on this machine, where only its library can tell:
    asked in a process that may import torch. Empty where it can.
    """
    ask: Callable[[int], str] | None = getattr(_module(name_of(backend)), "missing_for", None)
    return ask(ranks) if ask is not None else ""


def variables(backend: str, ranks: int) -> dict[str, str]:
    """What `ranks` ranks on this machine need in their environment, but for what is set."""
    if not is_known(backend):
        return {}
    ask: Callable[[int], dict[str, str]] | None
    ask = getattr(_module(name_of(backend)), "variables", None)
    return ask(ranks) if ask is not None else {}


def register(backend: str) -> str:
    """Makes torch know a backend, in a rank, before `init_process_group`; returns the name to give
    it. Raises CannotRunError where its library cannot be loaded.
    """
    do: Callable[[], str] | None = getattr(_module(name_of(backend)), "register", None)
    return do() if do is not None else backend


def note_calls(backend: str, registered: str) -> None:
    """Record calls of a backend that torch knows as `registered`, if torch records none."""
    if not is_known(backend):
        return
    note: Callable[[str], None] | None = getattr(_module(name_of(backend)), "note_calls", None)
    if note is not None:
        note(registered)


def _module(backend: str) -> ModuleType:
    if backend in registry.BACKENDS:
        return registry.load(backend)
    return importlib.import_module(f"{__name__}.{backend}")
