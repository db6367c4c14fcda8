"""Simulated worlds: ranks are threads of one process, and exactly one of them runs at a time.

A collective is checked when a rank posts it, and computed when the last rank of its group has
posted it. It uses one of the reduction orders of `collectives.py`. A world may therefore have more
ranks than this machine has cores or memory for. Mismatched calls are found at once, and a deadlock
is detected without a deadline.

    share.py           front-end handle of the process that runs all ranks
    host.py            main program of that process: runs each rank's job and reports how each rank
                       ends
    search.py          the process that tries schedules, each in a fork of itself
    scheduler.py       cooperative scheduler of the rank threads; sleeping takes no time
    schedules.py       the schedules of a search, and the next rank under a schedule
    world.py           the ranks and their calls; checks that calls of a group match; ends the world
    group.py           the process group, and the store for its rendezvous
    calls.py           a posted call, and its place in the source
    collectives.py     computes the results of collectives, in a given reduction order
    work.py            a started call (`Work`) and its future
    in_flight.py       detects accesses to tensors that a call still reads or writes
    groups.py          checks that ranks agree on the groups that they create, and destroy them
    suspicious_calls.py
                       detects calls that gloo accepts but that are rarely intended
    isolation.py       gives each rank its own copy of state that threads would share, such as RNGs
                       and settings of Python and torch
    patches.py         does the same for attributes that code sets in shared modules
    limits.py          operations that the code under test must not use in a simulated world
    rank_threads.py    copies the state of a pytest test for each rank
    judged_schedules.py
                       the check of schedules, and the cause of a failure
    scale.py           the cases of `distcheck scale`
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distcheck.addons.simulated.judged_schedules import (
    check_schedules,
    describe_search,
    differing_calls,
)

if TYPE_CHECKING:
    from datetime import timedelta
    from types import ModuleType

    import torch

    from distcheck.records.schedules import ScheduleSearchResult
    from distcheck.worlds.rendezvous import Rendezvous
    from distcheck.worlds.shares import Share

__all__ = ["check_schedules", "describe_search", "differing_calls"]  # of schedules

# Values after the colon in `simulated:ORDER`; the first is the default.
ORDERS = ("gloo", "ring", "tree", "recursive-halving", "rank")


def sum_in(order: str, collective: str) -> "Callable[[list[torch.Tensor]], torch.Tensor]":
    """Return a function that reduces vectors [n], given in rank order, to their sum [n] in the
    order that `all_reduce` or `reduce` uses.
    """
    from distcheck.addons.simulated import collectives

    def add_up(shards: "list[torch.Tensor]") -> "torch.Tensor":
        return collectives.reduce_in_order(order, collective, shards)

    return add_up


def join_world(rendezvous: "Rendezvous", timeout: "timedelta", usual_limit_s: float) -> Any:
    """Create the default process group of a rank, and return its `torch.distributed.Store`. The
    ranks share a process, so their rendezvous is in memory.
    """
    import torch.distributed as dist

    from distcheck.addons.simulated.group import SimulatedStore, register
    from distcheck.addons.simulated.world import current_world

    current_world().usual_limit_s = usual_limit_s
    store = SimulatedStore(current_world())
    dist.init_process_group(
        register(),
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.world,
        timeout=timeout,
    )
    return store


def start_share(pool: Any, **named: Any) -> "Share":
    """Start the process that runs all ranks; see `SimulatedShare` for its arguments."""
    from distcheck.addons.simulated.share import SimulatedShare

    return SimulatedShare(pool, **named)


def search_schedules(pool: Any, ranks: Any, **named: Any) -> "ScheduleSearchResult":
    """Run ranks under the default schedule and under others; see `share.search_schedules`."""
    from distcheck.addons.simulated.share import search_schedules

    return search_schedules(pool, ranks, **named)


def called_os_exit(error: BaseException) -> bool:
    """Return True if a rank thread raised `error` because its code called `os._exit`."""
    from distcheck.addons.simulated.limits import RankLeftError

    return isinstance(error, RankLeftError)


def rank_threads_module() -> "ModuleType":
    """Return the module `rank_threads`, which copies the state of a pytest test for each rank."""
    from distcheck.addons.simulated import rank_threads

    return rank_threads
