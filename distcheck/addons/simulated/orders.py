"""The orders in which a simulated collective combines the ranks' inputs.

gloo                bit-identical to gloo on CPU: see `backends/gloo.py`
ring                a ring with one chunk for each rank, as NCCL and MPI libraries use for long
                    vectors: chunk c is ((x[c-1] + x[c-2]) + ...) + x[c], indices modulo the world
                    size
tree                neighbors first: (x0 + x1) + (x2 + x3), then their sums; a rank without a
                    neighbor waits for the next level
recursive-halving   the far half first: x[i] + x[i + p/2], with p the largest power of two within
                    the world size; ranks beyond it first add theirs to those of ranks 0, 1, ...
rank                ((x0 + x1) + x2) + ...
"""

from collections.abc import Callable

import torch

from distcheck.backends import gloo

Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reduced(
    order: str, collective: str, shards: list[torch.Tensor], combine: Combine = torch.add
) -> torch.Tensor:
    """Return the vectors [n] of all ranks, in rank order, combined by `collective` ("all_reduce",
    "reduce") in an order of `ORDERS`; a new vector [n].
    """
    if len(shards) == 1:
        return shards[0].clone()
    if order == "gloo":
        bounds = gloo.chunk_bounds if collective != "reduce" else gloo.reduce_chunk_bounds
        found = bounds(shards[0].numel(), shards[0].element_size(), len(shards))
        return gloo.ring_sum(shards, found, combine)
    return _IN_ORDER[order](shards, combine)


def _ring(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    elements, world = shards[0].numel(), len(shards)
    chunk = -(-elements // world)
    bounds = [(min(c * chunk, elements), min((c + 1) * chunk, elements)) for c in range(world)]
    return gloo.ring_sum(shards, bounds, combine)


def _tree(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    level = torch.stack(shards)
    while len(level) > 1:
        pairs = combine(level[0 : len(level) - 1 : 2], level[1::2])
        level = torch.cat([pairs, level[-1:]]) if len(level) % 2 else pairs
    return level[0]


def _recursive_halving(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    level = torch.stack(shards)
    power = 1 << (len(shards).bit_length() - 1)
    beyond = len(shards) - power
    if beyond:
        level[:beyond] = combine(level[:beyond], level[power:])
        level = level[:power]
    while len(level) > 1:
        level = combine(level[: len(level) // 2], level[len(level) // 2 :])
    return level[0]


def _rank(shards: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    total = shards[0]
    for shard in shards[1:]:
        total = combine(total, shard)
    return total


_IN_ORDER: dict[str, Callable[[list[torch.Tensor], Combine], torch.Tensor]] = {
    "ring": _ring,
    "tree": _tree,
    "recursive-halving": _recursive_halving,
    "rank": _rank,
}
