"""gloo on the CPU: the exact summation order of its all_reduce and its reduce.

The default all_reduce is a ring: a reduce-scatter over chunks, followed by an all-gather. The sum
of a chunk starts on the rank after the chunk's owner and travels down the ring; each rank adds its
own part to the received sum. The chunk sizes follow from the size of the vector in bytes (gloo,
allreduce.cc: kMaxSegmentSize is 1 MiB; at least two segments per rank, a multiple of the world
size). The reduce is the same ring with other chunks, for any root.

`distcheck.judge.oracles.calibration` confirms both orders on the machine before anything relies on
them.
"""

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_MOST_SEGMENT_BYTES = 1 << 20
_INTERFACES = "GLOO_SOCKET_IFNAME"
# Measured: above it, W * W small additions take longer than a copy of all vectors; with 30,000
# elements and 16 ranks, both take equally long.
_FEW_RANKS = 16


def missing() -> str:
    """Return an error message if an environment variable names a network interface that this
    machine lacks.
    """
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACES, "").split(",")):
        if name not in here:
            return (
                f"{_INTERFACES} names the network interface {name!r}, which this machine does not "
                f"have; it has {', '.join(here)}"
            )
    return ""


def chunk_bounds(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """Return the begin and end of each of the `world` chunks, in elements. Trailing chunks may be
    empty.

    For b bytes and a largest segment of s bytes, there are n = max(ceil(b / s), 2W) segments,
    rounded up to a multiple of W. A segment has ceil(b / n) bytes, rounded up to whole elements. A
    chunk has n / W segments.
    """
    total = elements * element_bytes
    most = element_bytes * max(1, _MOST_SEGMENT_BYTES // element_bytes)
    segments = _round_up(max(-(-total // most), 2 * world), world)
    segment = _round_up(-(-total // segments), element_bytes)
    return _chunks(elements, segment * (segments // world) // element_bytes, world)


def reduce_chunk_bounds(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """Return the chunks of reduce (gloo, reduce.cc), in the format of `chunk_bounds`.

    The segment size is determined first: s = min(ceil(b / 2W), 1 MiB), rounded up to whole
    elements. Then n = max(ceil(b / s), 2W), rounded up to a multiple of W.
    """
    total = elements * element_bytes
    segment = _round_up(min(-(-total // (2 * world)), _MOST_SEGMENT_BYTES), element_bytes)
    segments = _round_up(max(-(-total // segment) if segment else 0, 2 * world), world)
    return _chunks(elements, segment * (segments // world) // element_bytes, world)


def all_reduce_sum(shards: "list[torch.Tensor]") -> "torch.Tensor":
    """Return the result of gloo's all_reduce(SUM) on every rank, bit-identical.

    `shards` are the vectors [n] of the ranks, in rank order, all of the same floating-point dtype.
    Chunk c is ((x[c-1] + x[c-2]) + ...) + x[c], rank indices modulo W.
    """
    return ring_sum(shards, chunk_bounds(shards[0].numel(), shards[0].element_size(), len(shards)))


def reduce_sum(shards: "list[torch.Tensor]") -> "torch.Tensor":
    """Return the result of gloo's reduce(SUM) on the root, bit-identical. `shards` as in
    `all_reduce_sum`.
    """
    bounds = reduce_chunk_bounds(shards[0].numel(), shards[0].element_size(), len(shards))
    return ring_sum(shards, bounds)


def ring_sum(
    shards: "list[torch.Tensor]",
    bounds: list[tuple[int, int]],
    combine: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None" = None,
) -> "torch.Tensor":
    """Return the ring reduction of the ranks' vectors [n]; `bounds` has one chunk for each rank.
    `combine` defaults to addition.
    """
    import torch  # imported here, so that the front end can query gloo

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
    """Compute `ring_sum` for all chunks at once, in W operations instead of W * W.

    The vectors are the rows of a matrix, padded to W chunks of equal length. At distance k, the
    operand of chunk c is in row c - k and column c. These operands form a diagonal that wraps
    around once.
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
