"""The orders in which a world in one process may add; `worlds/simulated` is that world."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# What follows the colon in `simulated:ORDER`; the first is taken where nothing does.
ORDERS = ("gloo", "ring", "tree", "recursive-halving", "rank")


def sum_in(order: str, collective: str) -> "Callable[[list[torch.Tensor]], torch.Tensor]":
    """How `all_reduce` or `reduce` adds in an order: vectors [n] in rank order -> their sum [n]."""
    from distcheck.backends.simulated import orders

    def add_up(shards: "list[torch.Tensor]") -> "torch.Tensor":
        return orders.reduced(order, collective, shards)

    return add_up
