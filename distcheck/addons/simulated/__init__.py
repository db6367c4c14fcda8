"""Worlds whose ranks are threads of one process, of which exactly one runs at a time.

A collective is checked when it is posted, and computed when the last of its ranks has posted it, in
one of the reduction orders of `collectives.py`. A world may therefore have more ranks than this
machine has cores or memory for, mismatched calls are found at once, and a deadlock is detected
without a deadline.

share.py           front-end handle of the process that runs all ranks
host.py            the process itself: runs the job of every rank, and reports how each ends
search.py          the process that tries schedules, each in a fork of itself
scheduler.py       cooperative scheduler of the threads; sleep takes no time
schedules.py       the schedules of a search, and the next rank under a schedule
world.py           the ranks of this process, their calls, whether calls within a group match, and
                   how their world ends
group.py           the process group, and the store for its rendezvous
calls.py           a posted call, and its place in the source
collectives.py     the results of each collective, from the inputs of all ranks, by reduction order
work.py            a started call, and the wait for it
in_flight.py       tensors that a call still reads or writes
groups.py          the groups that ranks create: whether they agree, and whether they are destroyed
suspicious_calls.py
                   calls that gloo accepts, and that are rarely intended
isolation.py       state that threads share and processes do not, such as RNGs and settings of
                   Python and torch
patches.py         attributes that code sets in modules shared by all ranks
limits.py          operations that the code under test must not use in a simulated world
rank_threads.py    state of a pytest test that each rank owns
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
    """Return a function that reduces vectors [n] in rank order to their sum [n], in the order that
    `all_reduce` or `reduce` uses.
    """
    from distcheck.addons.simulated import collectives

    def add_up(shards: "list[torch.Tensor]") -> "torch.Tensor":
        return collectives.reduce_in_order(order, collective, shards)

    return add_up


def join_world(rendezvous: "Rendezvous", timeout: "timedelta", usual_limit_s: float) -> Any:
    """Create a rank's default process group, and return its store, a `torch.distributed.Store`. The
    ranks rendezvous in memory, because they share a process.
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
    """Run ranks under the default schedule and others; see `share.search_schedules`."""
    from distcheck.addons.simulated.share import search_schedules

    return search_schedules(pool, ranks, **named)


def called_os_exit(error: BaseException) -> bool:
    """Return True if a rank, which is a thread, raised because it called `os._exit`."""
    from distcheck.addons.simulated.limits import RankLeftError

    return isinstance(error, RankLeftError)


def rank_threads_module() -> "ModuleType":
    """Return the module that gives each rank of a pytest world its own copy of the test's state."""
    from distcheck.addons.simulated import rank_threads

    return rank_threads
