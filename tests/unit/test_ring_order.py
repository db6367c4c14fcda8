"""The sum that RingOrder promises."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.judge.oracles.order_exact import ring_sum


@given(world=st.integers(1, 8), elements=st.integers(0, 100), seed=st.integers(0, 99))
def test_chunk_by_chunk_from_its_own_rank_upwards(world: int, elements: int, seed: int) -> None:
    """The same sum as messages would make it; sizes below the world leave chunks empty."""
    generator = torch.Generator().manual_seed(seed)
    shards = [torch.randn(elements, generator=generator) for _ in range(world)]
    expected = []
    for chunk in range(world):
        parts = [shards[(chunk + k) % world].tensor_split(world)[chunk] for k in range(world)]
        total = parts[0]
        for part in parts[1:]:
            total = part + total
        expected.append(total)
    assert torch.equal(ring_sum(shards), torch.cat(expected))


def test_chunks_begin_on_different_ranks() -> None:
    # 2^24 swallows a 1 that is added to it, -2^24 does not: the order shows in the result.
    shards = [torch.full((4,), value) for value in (2.0**24, 1.0, -(2.0**24), 1.0)]
    assert ring_sum(shards).tolist() == [1.0, 2.0, 2.0, 0.0]
