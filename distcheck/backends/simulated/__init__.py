"""The reduction orders of a world in one process; `worlds/simulated` is that world."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

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
