"""The rounding bound holds for every order, and is no wider than it must be."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.oracles.rounding import gamma, interval, unit_roundoff

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])


def shards_of(
    seed: int, world: int, elements: int, dtype: torch.dtype, spread: int
) -> list[torch.Tensor]:
    """Gradients whose magnitudes spread over 2^-spread .. 2^spread, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (world, elements), generator=generator)
    mantissas = torch.randn(world, elements, generator=generator, dtype=torch.float64)
    return [row.to(dtype) for row in mantissas * torch.pow(2.0, exponents.double())]


def add_in_some_order(parts: list[torch.Tensor], order: random.Random) -> torch.Tensor:
    """Adds pairs picked at random until one is left: any tree, in the dtype itself."""
    parts = list(parts)
    while len(parts) > 1:
        first = parts.pop(order.randrange(len(parts)))
        second = parts.pop(order.randrange(len(parts)))
        parts.append(first + second)
    return parts[0]


@given(
    seed=st.integers(0, 10_000),
    world=st.integers(2, 12),
    dtype=DTYPES,
    spread=st.integers(0, 12),
    before=st.booleans(),
)
def test_any_order_of_a_correct_mean_is_within_the_bound(
    seed: int, world: int, dtype: torch.dtype, spread: int, before: bool
) -> None:
    spread = min(spread, 3) if dtype == torch.float16 else spread
    shards = shards_of(seed, world, 50, dtype, spread)
    known = interval(shards, [1 / world] * world)
    if before:
        actual = add_in_some_order([s * (1 / world) for s in shards], random.Random(seed))
    else:
        actual = add_in_some_order(shards, random.Random(seed)) / world
    error = (actual.double() - known.mean).abs()
    assert bool((error <= known.bound).all())


@given(seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 90), min_size=2, max_size=8))
def test_weighted_means_are_within_the_bound(seed: int, sizes: list[int]) -> None:
    world, total = len(sizes), sum(sizes)
    shards = shards_of(seed, world, 50, torch.float32, 4)
    known = interval(shards, [n / total for n in sizes])
    weighted = [s * (n * world / total) for s, n in zip(shards, sizes, strict=True)]
    actual = add_in_some_order(weighted, random.Random(seed)) / world
    assert bool(((actual.double() - known.mean).abs() <= known.bound).all())


@given(seed=st.integers(0, 1000), world=st.integers(2, 8), dtype=DTYPES)
def test_the_mean_is_exact_up_to_its_own_error(seed: int, world: int, dtype: torch.dtype) -> None:
    shards = shards_of(seed, world, 5, dtype, 3)
    known = interval(shards, [1 / world] * world)
    for i in range(5):
        exact = sum((Fraction(float(s[i])) for s in shards), Fraction()) / world
        largest = sum(abs(float(s[i])) for s in shards) / world
        assert abs(Fraction(float(known.mean[i])) - exact) <= Fraction(2 * world * largest) / 2**52


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_scale_error_of_a_millionth_is_outside(world: int) -> None:
    shards = shards_of(1, world, 1000, torch.float32, 0)
    known = interval(shards, [1 / world] * world)
    scaled = known.mean * (1 + 1e-6)
    assert bool(((scaled - known.mean).abs() > known.bound).any())


def test_underflow_is_allowed_for_and_no_more() -> None:
    tiny = torch.full((1,), 2.0**-149)
    known = interval([tiny, tiny], [0.5, 0.5])
    halved = tiny / 2 + tiny / 2  # both products round to zero
    assert bool(((halved.double() - known.mean).abs() <= known.bound).all())
    assert float(known.bound) < 2.0**-145


def test_gamma_is_highams() -> None:
    assert gamma(3, 2.0**-24) == 3 * 2.0**-24 / (1 - 3 * 2.0**-24)
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
