"""Registry of communication backends; one file or package each. Importing a backend does not import
torch. A backend may define:

all_reduce_sum(shards)   its reduction order, if established; results of other backends are judged
                         by error bounds only
reduce_sum(shards)       the reduction order of a reduce to one rank
ORDERS, sum_in(order, collective)
                         instead of these two: the orders that may follow the backend's name and
                         a colon (`simulated:tree`)
missing() -> str         the reason why it cannot run here
missing_for(ranks) -> str
                         the reason why that many ranks cannot run on this machine; may import torch
variables(ranks) -> dict[str, str]
                         environment variables for that many ranks on one machine
register() -> str        registers it with torch, in a rank; returns torch's name for it
note_calls(name)         records its calls in this process, if torch does not; `name` is torch's
                         name for the backend
"""

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from distcheck import registry
from distcheck.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch


def backend_names() -> list[str]:
    """Return the names of the backends with which distcheck can create a world."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    added = filter(registry.is_installed, registry.BACKENDS)
    return sorted({*added, *(name for name in found if not name.startswith("_"))})


def check_name(backend: str) -> None:
    """Raise UsageError for an unknown backend. The message lists the backends that can run here."""
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
    """Return the name of a backend without its reduction order: "simulated" for
    "simulated:tree".
    """
    return backend.partition(":")[0]


def order_of(backend: str) -> str:
    """Return the reduction order of a backend that has several; the first one by default."""
    order = backend.partition(":")[2]
    return order or next(iter(_orders(name_of(backend))), "")


def names_with_orders() -> list[str]:
    names = backend_names()
    return names + [f"{name}:{order}" for name in names for order in _orders(name)]


def is_known(backend: str) -> bool:
    """Return True for the name of a backend of distcheck, with or without one of its reduction
    orders.
    """
    return backend in names_with_orders()


def _orders(name: str) -> tuple[str, ...]:
    return getattr(_module(name), "ORDERS", ())


def all_reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """Return a function that sums in the reduction order of the backend's all_reduce; None if it is
    unknown.
    """
    return _sum_of(backend, "all_reduce")


def reduce_sum(backend: str) -> "Callable[[list[torch.Tensor]], torch.Tensor] | None":
    """Return a function that sums in the reduction order of the backend's reduce; None if it is
    unknown.
    """
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
    """Return the reason why a backend cannot run on this machine, with the package to install.
    Return an empty string if it can, as far as this can be determined without torch.
    """
    if name_of(backend) in registry.BACKENDS and not registry.is_installed(name_of(backend)):
        return f"the add-on {name_of(backend)!r} is not installed; reinstall distcheck"
    ask: Callable[[], str] | None = getattr(_module(name_of(backend)), "missing", None)
    return ask() if ask is not None else ""


def missing_for(backend: str, ranks: int) -> str:
    """Return the reason why a backend cannot run that many ranks on this machine, if only its
    library can tell; empty if it can. Call this in a process that may import torch.
    """
    ask: Callable[[int], str] | None = getattr(_module(name_of(backend)), "missing_for", None)
    return ask(ranks) if ask is not None else ""


def variables(backend: str, ranks: int) -> dict[str, str]:
    """Return the environment variables that `ranks` ranks on this machine need, except those that
    are set already.
    """
    if not is_known(backend):
        return {}
    ask: Callable[[int], dict[str, str]] | None
    ask = getattr(_module(name_of(backend)), "variables", None)
    return ask(ranks) if ask is not None else {}


def register(backend: str) -> str:
    """Register a backend with torch, in a rank, before `init_process_group`. Return the name to
    pass to it. Raises CannotRunError if the backend's library cannot be loaded.
    """
    do: Callable[[], str] | None = getattr(_module(name_of(backend)), "register", None)
    return do() if do is not None else backend


def note_calls(backend: str, registered: str) -> None:
    """Record the calls of a backend that torch knows as `registered`, unless torch records them."""
    if not is_known(backend):
        return
    note: Callable[[str], None] | None = getattr(_module(name_of(backend)), "note_calls", None)
    if note is not None:
        note(registered)


def _module(backend: str) -> ModuleType:
    if backend in registry.BACKENDS:
        return registry.load(backend)
    return importlib.import_module(f"{__name__}.{backend}")
