"""X: the synchronised gradient to the bit, by reducing the shards in the declared order.

`shards` are per rank the gradients of every parameter, as that rank's backward left them; an
absent gradient (None) is absent on every rank.
"""

from collections.abc import Callable, Sequence

import torch

from distcheck import backends
from distcheck.contract import BackendAllReduce, Contract, DDPBuckets, RankOrder

Gradients = Sequence[torch.Tensor | None]
Reduce = Callable[[list[torch.Tensor]], torch.Tensor]

_MIB = 1 << 20


def expected_gradients(
    contract: Contract,
    backend: str,
    shards: Sequence[Gradients],
    *,
    weights: Sequence[float],
    step: int,
    ready_order: Sequence[int],
) -> list[torch.Tensor | None]:
    """What every rank must hold after the sync, per parameter.

    `weights` are the ranks' sample weights n_r * W / N; `ready_order` lists the parameters in
    the order in which rank 0's first backward finished them, which DDP forms its buckets from.
    """
    world = len(shards)
    prepared = [
        [_prepare(g, weight, contract, world) for g in shard]
        for shard, weight in zip(shards, weights, strict=True)
    ]
    groups = _groups(contract, prepared[0], step=step, ready_order=ready_order)
    reduce_sum = _reduction(contract, backend)
    result: list[torch.Tensor | None] = [None] * len(prepared[0])
    for group in groups:
        flat = [torch.cat([_present(shard[i]).reshape(-1) for i in group]) for shard in prepared]
        total = reduce_sum(flat)
        if contract.scale == "divide-after":
            total = total / world
        sizes = [_present(prepared[0][i]).numel() for i in group]
        for index, part in zip(group, total.split(sizes), strict=True):
            result[index] = part.view_as(_present(prepared[0][index]))
    return result


def rank_order_sum(shards: list[torch.Tensor]) -> torch.Tensor:
    """((x0 + x1) + x2) + ..."""
    total = shards[0].clone()
    for shard in shards[1:]:
        total = total + shard
    return total


def ddp_buckets(
    gradients: Gradients, order: DDPBuckets, *, step: int, ready_order: Sequence[int]
) -> list[list[int]]:
    """DDP's buckets as lists of parameter indices (torch 2.11 to 2.15, c10d reducer).

    In the first iteration every parameter of a dtype shares one bucket, in registration order.
    After the first backward the buckets are rebuilt in the order in which rank 0's gradients
    became ready; one closes as soon as it holds at least its limit: the first limit for the
    first bucket of a dtype, the cap for the others.
    """
    present = [i for i, g in enumerate(gradients) if g is not None]
    sequence = present if step == 0 else [i for i in ready_order if gradients[i] is not None]
    limits = (order.first_mib * _MIB, order.cap_mib * _MIB)
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int, int]] = {}
    for index in sequence:
        gradient = _present(gradients[index])
        members, size, closed = open_buckets.get(gradient.dtype, ([], 0, 0))
        members = [*members, index]
        size += gradient.numel() * gradient.element_size()
        if step > 0 and size >= limits[min(closed, 1)]:
            buckets.append(members)
            members, size, closed = [], 0, closed + 1
        open_buckets[gradient.dtype] = (members, size, closed)
    return buckets + [members for members, _, _ in open_buckets.values() if members]


def _groups(
    contract: Contract, gradients: Gradients, *, step: int, ready_order: Sequence[int]
) -> list[list[int]]:
    if isinstance(contract.order, DDPBuckets):
        return ddp_buckets(gradients, contract.order, step=step, ready_order=ready_order)
    return [[i] for i, g in enumerate(gradients) if g is not None]


def _reduction(contract: Contract, backend: str) -> Reduce:
    if isinstance(contract.order, RankOrder):
        return rank_order_sum
    known = backends.all_reduce_sum(backend)
    if known is None or not isinstance(contract.order, BackendAllReduce | DDPBuckets):
        raise ValueError(f"no known order for {contract.order} on {backend}")
    return known


def _prepare(
    gradient: torch.Tensor | None, weight: float, contract: Contract, world: int
) -> torch.Tensor | None:
    if gradient is None:
        return None
    if contract.weighting != "loss" and weight != 1.0:
        gradient = gradient * weight
    if contract.scale == "multiply-before":
        gradient = gradient * (1.0 / world)
    return gradient


def _present(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient
