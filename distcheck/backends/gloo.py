"""gloo on CPU: the exact order in which its all_reduce adds.

Its default all_reduce is a ring: a reduce-scatter over chunks, then an all-gather. A chunk
starts on the rank behind the one that will own it and travels down the ring, and every rank adds
its own part to what arrives. How the vector is cut into chunks follows from its size in bytes
(gloo, allreduce.cc: kMaxSegmentSize is 1 MiB; at least two segments per rank, a multiple of
the world). `distcheck.oracles.calibration` confirms it on the machine before anything relies on
it.
"""

import torch

_MOST_SEGMENT_BYTES = 1 << 20


def chunk_bounds(elements: int, element_bytes: int, world: int) -> list[tuple[int, int]]:
    """Where each of the `world` chunks begins and ends, in elements; trailing ones may be empty.

    With b bytes in all, s the largest segment: n = max(ceil(b / s), 2W) rounded up to a multiple
    of W segments of ceil(b / n) bytes, rounded up to whole elements; n / W segments a chunk.
    """
    total = elements * element_bytes
    most = element_bytes * max(1, _MOST_SEGMENT_BYTES // element_bytes)
    segments = _round_up(max(-(-total // most), 2 * world), world)
    segment = _round_up(-(-total // segments), element_bytes)
    chunk = segment * (segments // world) // element_bytes
    return [(min(c * chunk, elements), min((c + 1) * chunk, elements)) for c in range(world)]


def all_reduce_sum(shards: list[torch.Tensor]) -> torch.Tensor:
    """What gloo's all_reduce(SUM) leaves on every rank, to the bit.

    `shards` are the ranks' vectors [n], in rank order, all of one floating dtype. Chunk c is
    ((x[c-1] + x[c-2]) + ...) + x[c], rank indices modulo W.
    """
    world = len(shards)
    result = torch.empty_like(shards[0])
    bounds = chunk_bounds(shards[0].numel(), shards[0].element_size(), world)
    for chunk, (begin, end) in enumerate(bounds):
        if begin == end:
            continue
        total = shards[(chunk - 1) % world][begin:end].clone()
        for distance in range(2, world + 1):
            total = shards[(chunk - distance) % world][begin:end] + total
        result[begin:end] = total
    return result


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
