"""The bitwise layer: computes the bits of the reduced gradient by reducing the shards in the
declared order.

`shards` are the local gradients of every parameter, for each rank. An absent gradient (None) counts
as zeros if any rank has a gradient; otherwise the result is absent. Elements are numbered by memory
order, which for channels_last and transposed parameters differs from the order of indices; a
hand-written ring numbers them by index. A complex element is two real ones in sequence.
"""

from collections.abc import Callable, Sequence

import torch

from distcheck import backends
from distcheck.contract import (
    BackendAllReduce,
    BackendReduce,
    Contract,
    DDPBuckets,
    RankOrder,
    RingOrder,
)
from distcheck.machine.numerics import real_parts

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
    like: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return every rank's gradients after synchronization, for each parameter.

    `weights` are the ranks' sample weights n_r * W / N. `ready_order` lists the parameters in the
    order in which rank 0's backward finished them, from which DDP forms its buckets. `like` are the
    parameters, as they were when the strategy received them.
    """
    world = len(shards)
    prepared = [
        [_prepare(g, weight, contract, world) for g in shard]
        for shard, weight in zip(shards, weights, strict=True)
    ]
    groups = _groups(contract, shards, step=step, ready_order=ready_order, like=like)
    reduce_sum = _reduction(contract, backend, world)
    in_memory = not isinstance(contract.order, RingOrder)
    permuted = [in_memory and _is_permuted(parameter) for parameter in like]
    result: list[torch.Tensor | None] = [None] * len(prepared[0])
    for group in groups:
        flat = [
            torch.cat([_flatten(shard[i], like[i], contract, permuted[i]) for i in group])
            for shard in prepared
        ]
        total = reduce_sum(flat).to(real_parts(like[group[0]]).dtype)
        sizes = [real_parts(like[i]).numel() for i in group]
        for index, part in zip(group, total.split(sizes), strict=True):
            if _is_absent(shards, index):
                continue
            mean = _unflatten(part, like[index], permuted[index])
            result[index] = mean / world if contract.scale == "divide-after" else mean
    return result


def _is_permuted(like: torch.Tensor) -> bool:
    """Return True if memory is dense but not in the order of indices. Gradients of such a parameter
    have its layout; those of any other are contiguous.
    """
    if like.is_contiguous():
        return False
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    return last + 1 == like.numel()


def _flatten(
    gradient: torch.Tensor | None, like: torch.Tensor, contract: Contract, permuted: bool
) -> torch.Tensor:
    """Return real numbers [n] in the order of communication; zeros for an absent gradient."""
    if gradient is None:
        wire = None if contract.wire is None else getattr(torch, contract.wire)
        gradient = torch.zeros_like(like, dtype=wire)
    if permuted:
        in_memory = torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)
        gradient = in_memory.as_strided((gradient.numel(),), (1,))
    return real_parts(gradient.reshape(-1)).reshape(-1)


def _unflatten(flat: torch.Tensor, like: torch.Tensor, permuted: bool) -> torch.Tensor:
    if like.is_complex():
        flat = torch.view_as_complex(flat.view(-1, 2))
    if not permuted:
        return flat.view(like.shape)
    return flat.contiguous().as_strided(like.shape, like.stride())


def rank_order_sum(shards: list[torch.Tensor]) -> torch.Tensor:
    """Return ((x0 + x1) + x2) + ..."""
    total = shards[0].clone()
    for shard in shards[1:]:
        total = total + shard
    return total


def ring_sum(shards: list[torch.Tensor]) -> torch.Tensor:
    """Return the ring sum of `RingOrder`: element i of chunk c is ((x[c] + x[c+1]) + ...) + x[c-1].
    The implementation adds by rank, not by message: term k of element i comes from rank c + k.
    """
    world, elements = len(shards), shards[0].numel()
    short, longer = divmod(elements, world)
    position = torch.arange(elements)
    border = longer * (short + 1)  # chunks before this are one longer
    chunk = torch.where(
        position < border,
        position // (short + 1),
        longer + (position - border) // max(short, 1),
    )
    table = torch.stack(shards)
    total = table[chunk, position]
    for distance in range(1, world):
        total = total + table[(chunk + distance) % world, position]
    return total


def ddp_buckets(
    gradients: Gradients,
    order: DDPBuckets,
    *,
    step: int,
    ready_order: Sequence[int],
    like: Sequence[torch.Tensor],
) -> list[list[int]]:
    """Return DDP's buckets as lists of parameter indices (torch 2.11 to 2.15, c10d reducer).

    In the first iteration all parameters of a dtype share one bucket, in registration order. At
    `order.rebuilt_at` the buckets are rebuilt in the order in which rank 0's gradients became ready
    in the previous backward. A bucket closes when it reaches its limit: the first limit for the
    first bucket of a dtype, the cap for others. Without a rebuild the limits hold from the first
    iteration, in registration order. If DDP tolerates parameters without gradients, those that
    train still have a place in a bucket (as zeros), in rebuilt ones at the end.
    """
    present = [
        i
        for i, (gradient, parameter) in enumerate(zip(gradients, like, strict=True))
        if gradient is not None or parameter.requires_grad
    ]
    rebuilt = order.rebuilt_at is not None and step >= order.rebuilt_at
    limited = rebuilt or order.rebuilt_at is None
    ready = [i for i in ready_order if gradients[i] is not None]
    sequence = [*ready, *(i for i in present if i not in ready)] if rebuilt else present
    limits = (order.first_mib * _MIB, order.cap_mib * _MIB)
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, tuple[list[int], int, int]] = {}
    for index in sequence:
        gradient = like[index]
        members, size, closed = open_buckets.get(gradient.dtype, ([], 0, 0))
        members = [*members, index]
        size += gradient.numel() * gradient.element_size()
        if limited and size >= limits[min(closed, 1)]:
            buckets.append(members)
            members, size, closed = [], 0, closed + 1
        open_buckets[gradient.dtype] = (members, size, closed)
    return buckets + [members for members, _, _ in open_buckets.values() if members]


def _groups(
    contract: Contract,
    shards: Sequence[Gradients],
    *,
    step: int,
    ready_order: Sequence[int],
    like: Sequence[torch.Tensor],
) -> list[list[int]]:
    """Return lists of parameters that are reduced together; DDP's follow rank 0's backward."""
    if isinstance(contract.order, DDPBuckets):
        return ddp_buckets(shards[0], contract.order, step=step, ready_order=ready_order, like=like)
    return [[i] for i in range(len(like)) if not _is_absent(shards, i)]


def _is_absent(shards: Sequence[Gradients], index: int) -> bool:
    return all(shard[index] is None for shard in shards)


def _reduction(contract: Contract, backend: str, world: int) -> Reduce:
    if isinstance(contract.order, RankOrder) or world == 1:  # with world size 1 nothing is added
        return rank_order_sum
    if isinstance(contract.order, RingOrder):
        return ring_sum
    if isinstance(contract.order, BackendReduce):
        known = backends.reduce_sum(backend)
    else:
        known = backends.all_reduce_sum(backend)
    if known is None or not isinstance(
        contract.order, BackendAllReduce | BackendReduce | DDPBuckets
    ):
        raise ValueError(f"no known order for {contract.order} on {backend}")
    return known


def _prepare(
    gradient: torch.Tensor | None, weight: float, contract: Contract, world: int
) -> torch.Tensor | None:
    if gradient is None:
        return None
    if contract.weighting != "loss" and weight != 1.0:
        gradient = gradient * weight
    is_complex = gradient.is_complex() and contract.wire is None
    if contract.wire is not None:
        gradient = real_parts(gradient).to(getattr(torch, contract.wire))
    if contract.scale == "divide-before":
        # DDP's buckets hold complex numbers as pairs of real ones. torch divides a complex number
        # by a real one as a product with 1 / W, which rounds once more.
        if isinstance(contract.order, DDPBuckets):
            gradient = real_parts(gradient) / world
            return torch.view_as_complex(gradient) if is_complex else gradient
        gradient = gradient / world
    if contract.scale == "multiply-before":
        gradient = gradient * (1.0 / world)
    return gradient
