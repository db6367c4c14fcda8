"""How gloo's ring cuts a vector into chunks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.backends import gloo
from distcheck.backends.gloo import all_reduce_sum, chunk_bounds, reduce_chunk_bounds, reduce_sum

WORLDS = st.integers(1, 32)
SIZES = st.one_of(st.integers(0, 300), st.integers(0, 20_000_000))


@given(elements=SIZES, element_bytes=st.sampled_from([2, 4, 8]), world=WORLDS)
def test_chunks_tile_the_vector(elements: int, element_bytes: int, world: int) -> None:
    for bounds in (
        chunk_bounds(elements, element_bytes, world),
        reduce_chunk_bounds(elements, element_bytes, world),
    ):
        assert len(bounds) == world
        assert bounds[0][0] == 0
        assert bounds[-1][1] == elements
        assert all(begin <= end for begin, end in bounds)
        assert all(bounds[c][1] == bounds[c + 1][0] for c in range(world - 1))


def test_known_chunks() -> None:
    # 1003 float32 over 4 ranks: 4012 bytes, 8 segments of 502 bytes rounded up to 504, two a chunk.
    assert chunk_bounds(1003, 4, 4) == [(0, 252), (252, 504), (504, 756), (756, 1003)]
    # fewer elements than ranks: one element a segment, two a chunk, nothing for the last ranks
    assert chunk_bounds(3, 4, 4) == [(0, 2), (2, 3), (3, 3), (3, 3)]


@given(world=st.integers(1, 8), elements=st.integers(0, 100), seed=st.integers(0, 99))
def test_the_sum_of_integers_is_the_sum(world: int, elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = [
        torch.randint(-1000, 1000, (elements,), generator=generator).float() for _ in range(world)
    ]
    assert torch.equal(all_reduce_sum(shards), torch.stack(shards).sum(0))
    assert torch.equal(reduce_sum(shards), torch.stack(shards).sum(0))


@given(world=st.integers(17, 40), elements=st.integers(0, 300), seed=st.integers(0, 99))
def test_many_ranks_add_in_the_same_order(world: int, elements: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = [torch.randn(elements, generator=generator) for _ in range(world)]
    bounds = chunk_bounds(elements, 4, world)
    for combine in (torch.add, lambda one, other: one - 2 * other):
        expected = torch.empty(elements)
        for chunk, (begin, end) in enumerate(bounds):
            total = shards[(chunk - 1) % world][begin:end]
            for distance in range(2, world + 1):
                total = combine(shards[(chunk - distance) % world][begin:end], total)
            expected[begin:end] = total
        assert torch.equal(gloo.ring_sum(shards, bounds, combine), expected)


def test_each_chunk_starts_behind_its_owner() -> None:
    # 2^24 swallows a 1 that is added to it, so that the order shows in the result.
    big, small = 2.0**24, 1.0
    shards = [torch.full((8,), value) for value in (big, small, -big, small)]
    result = all_reduce_sum(shards)
    for chunk in range(4):
        order = [shards[(chunk - k) % 4][0] for k in range(1, 5)]
        total = order[0]
        for value in order[1:]:
            total = value + total
        assert result[2 * chunk] == total
    assert len(set(result.tolist())) > 1
