"""A world in one process: every rank is a thread, of which exactly one runs at a time.

A collective is compared when it is posted, and computed when the last of its ranks has posted it,
in one of ORDERS. So a world may have more ranks than this machine has cores or memory for, calls
that do not match are found at once, and ranks that all wait are a deadlock without any deadline.

baton.py        threads of which one runs at a time; sleep takes no time
schedules.py    which rank runs next, under a schedule
world.py        the ranks of this process, what each has called, and how their world ends
calls.py        what a rank has called, and where
matching.py     calls of one group, which must be alike; messages
leaks.py        groups that are made again and again, and never destroyed
odd_calls.py    calls that gloo takes, and that are rarely meant
in_flight.py    tensors that a call still reads or writes
collectives.py  what each collective leaves, from what every rank gave
orders.py       the orders in which it may add
work.py         a started call, and waiting for it
group.py        the process group
store.py        the store at which ranks meet
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH_NAME = "distcheck_simulated"
# What follows the colon in `simulated:ORDER`; the first is taken where nothing does.
ORDERS = ("gloo", "ring", "tree", "recursive-halving", "rank")


def sum_in(order: str, collective: str) -> "Callable[[list[torch.Tensor]], torch.Tensor]":
    """How `all_reduce` or `reduce` adds in an order: vectors [n] in rank order -> their sum [n]."""
    from distcheck.backends.simulated import orders

    def add_up(shards: "list[torch.Tensor]") -> "torch.Tensor":
        return orders.reduced(order, collective, shards)

    return add_up


def register() -> str:
    """Makes torch know this backend; returns its name."""
    import torch.distributed as dist

    if not hasattr(dist.Backend, TORCH_NAME.upper()):
        from distcheck.backends.simulated import group

        dist.Backend.register_backend(TORCH_NAME, group.create, extended_api=True, devices=["cpu"])
    return TORCH_NAME
