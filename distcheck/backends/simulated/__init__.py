"""The reduction orders of a world in one process; `worlds/simulated` is that world."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distcheck.backends.simulated.judged_schedules import found_by, judged, timelines

if TYPE_CHECKING:
    from datetime import timedelta
    from types import ModuleType

    import torch

    from distcheck.records.schedules import Searched
    from distcheck.worlds.rendezvous import Rendezvous
    from distcheck.worlds.shares import Share

__all__ = ["found_by", "judged", "timelines"]  # of schedules

# Values after the colon in `simulated:ORDER`; the first is the default.
ORDERS = ("gloo", "ring", "tree", "recursive-halving", "rank")


def sum_in(order: str, collective: str) -> "Callable[[list[torch.Tensor]], torch.Tensor]":
    """Return a function that reduces vectors [n] in rank order to their sum [n], in the order that
    `all_reduce` or `reduce` uses.
    """
    from distcheck.backends.simulated import orders

    def add_up(shards: "list[torch.Tensor]") -> "torch.Tensor":
        return orders.reduced(order, collective, shards)

    return add_up


def join(rendezvous: "Rendezvous", timeout: "timedelta", usual_limit_s: float) -> Any:
    """Make the default process group of a rank, which meets the others in their process's memory.
    Return its store, a `torch.distributed.Store`.
    """
    import torch.distributed as dist

    from distcheck.worlds.simulated.group import register
    from distcheck.worlds.simulated.store import SimulatedStore
    from distcheck.worlds.simulated.world import here

    here().usual_limit_s = usual_limit_s
    store = SimulatedStore(here())
    dist.init_process_group(
        register(),
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=timeout,
    )
    return store


def start_share(pool: Any, **named: Any) -> "Share":
    """Start the one process that stands for all ranks; see `SimulatedShare` for its arguments."""
    from distcheck.worlds.simulated.share import SimulatedShare

    return SimulatedShare(pool, **named)


def search_schedules(pool: Any, ranks: Any, **named: Any) -> "Searched":
    """Run ranks under the usual schedule and others; see `share.search_schedules`."""
    from distcheck.worlds.simulated.share import search_schedules

    return search_schedules(pool, ranks, **named)


def has_left(error: BaseException) -> bool:
    """Return True if a rank, which is a thread, raised because it called `os._exit`."""
    from distcheck.worlds.simulated.limits import RankLeftError

    return isinstance(error, RankLeftError)


def threads() -> "ModuleType":
    """Return the module that gives each rank of a pytest world its own copy of the test's state."""
    from distcheck.backends.simulated import rank_threads

    return rank_threads
