"""gloo on CPU: the exact order in which its all_reduce and its reduce add.

Its default all_reduce is a ring: a reduce-scatter over chunks, then an all-gather. A chunk
starts on the rank behind the one that will own it and travels down the ring, and every rank adds
its own part to what arrives. How the vector is cut into chunks follows from its size in bytes
(gloo, allreduce.cc: kMaxSegmentSize is 1 MiB; at least two segments per rank, a multiple of
the world). Its reduce is the same ring with other chunks, whatever the root.
`distcheck.judge.oracles.calibration` confirms both on the machine before anything relies on them.
"""

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MOST_SEGMENT_BYTES = 1 << 20
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Beyond it, W * W small additions take longer than a copy of all vectors: measured with 30,000
# elements, 16 ranks take as long in both ways.
_FEW_RANKS = 16


def missing() -> str:
    """An interface that the environment names and this machine does not have."""
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACES, "").split(",")):
        if name not in here:
            return (
                f"{_INTERFACES} names the network interface {name!r}, which this machine does not "
                f"have; it has {', '.join(here)}"
            )
    return ""


def chunk_bounds(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """Where each of the `world` chunks begins and ends, in elements; trailing ones may be empty.

    With b bytes in all, s the largest segment: n = max(ceil(b / s), 2W) rounded up to a multiple
    of W segments of ceil(b / n) bytes, rounded up to whole elements; n / W segments a chunk.
    """
    total = elements * element_bytes
    most = element_bytes * max(1, _MOST_SEGMENT_BYTES // element_bytes)
    segments = _round_up(max(-(-total // most), 2 * world), world)
    segment = _round_up(-(-total // segments), element_bytes)
    return _chunks(elements, segment * (segments // world) // element_bytes, world)


def reduce_chunk_bounds(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """The chunks of reduce (gloo, reduce.cc), as `chunk_bounds`.

    Here the segment comes first: s = min(ceil(b / 2W), 1 MiB), rounded up to whole elements,
    and then n = max(ceil(b / s), 2W), rounded up to a multiple of W.
    """
    total = elements * element_bytes
    segment = _round_up(min(-(-total // (2 * world)), _MOST_SEGMENT_BYTES), element_bytes)
    segments = _round_up(max(-(-total // segment) if segment else 0, 2 * world), world)
    return _chunks(elements, segment * (segments // world) // element_bytes, world)


def all_reduce_sum(shards: "list[torch.Tensor]") -> "torch.Tensor":
    """What gloo's all_reduce(SUM) leaves on every rank, to the bit.

    `shards` are the ranks' vectors [n], in rank order, all of one floating dtype. Chunk c is
    ((x[c-1] + x[c-2]) + ...) + x[c], rank indices modulo W.
    """
    return ring_sum(shards, chunk_bounds(shards[0].numel(), shards[0].element_size(), len(shards)))


def reduce_sum(shards: "list[torch.Tensor]") -> "torch.Tensor":
    """What gloo's reduce(SUM) leaves on the root, to the bit; `shards` as in all_reduce_sum."""
    bounds = reduce_chunk_bounds(shards[0].numel(), shards[0].element_size(), len(shards))
    return ring_sum(shards, bounds)


def ring_sum(
    shards: "list[torch.Tensor]",
    bounds: list[tuple[int, int]],
    combine: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None" = None,
) -> "torch.Tensor":
    """What a ring leaves of the ranks' vectors [n], cut into one chunk for each rank; `combine` is
    addition where it is not given.
    """
    import torch  # here, so that the front can ask about gloo

    combine, world = combine or torch.add, len(shards)
    if world > _FEW_RANKS:
        return _many_ranks_ring_sum(shards, bounds, combine)
    result = torch.empty_like(shards[0])
    for chunk, (begin, end) in enumerate(bounds):
        if begin == end:
            continue
        total = shards[(chunk - 1) % world][begin:end].clone()
        for distance in range(2, world + 1):
            total = combine(shards[(chunk - distance) % world][begin:end], total)
        result[begin:end] = total
    return result


def _many_ranks_ring_sum(
    shards: "list[torch.Tensor]",
    bounds: list[tuple[int, int]],
    combine: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]",
) -> "torch.Tensor":
    """The same, all chunks at once: W operations in place of W * W.

    The vectors lie below each other, filled up to W chunks of one length. What chunk c takes at
    distance k is row c - k, column c: a diagonal, which wraps around once.
    """
    import torch

    world, elements = len(shards), shards[0].numel()
    chunk = max(1, bounds[0][1] - bounds[0][0])
    rows = shards[0].new_empty(world, world * chunk)
    torch.stack(shards, out=rows[:, :elements])
    rows[:, elements:] = 0
    step = (world + 1) * chunk

    def diagonal(distance: int) -> "tuple[torch.Tensor, torch.Tensor]":
        after, before = (world - distance, chunk), (distance, chunk)
        return (
            rows.as_strided(after, (step, 1), distance * chunk),
            rows.as_strided(before, (step, 1), (world - distance) * world * chunk),
        )

    later, earlier = diagonal(1)
    total = torch.cat([earlier, later])
    for distance in range(2, world + 1):
        later, earlier = diagonal(distance)
        if len(later):
            total[distance:] = combine(later, total[distance:])
        total[:distance] = combine(earlier, total[:distance])
    return total.view(-1)[:elements].clone()


def _chunks(elements: int, chunk: int, world: int) -> list[tuple[int, int]]:
    return [(min(c * chunk, elements), min((c + 1) * chunk, elements)) for c in range(world)]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
