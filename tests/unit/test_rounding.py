"""The rounding bound holds for every order, and is no wider than it must be."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.judge.oracles.rounding import interval, reference_roundings
from distcheck.machine.numerics import NotBoundedError, gamma, unit_roundoff

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
    seed=st.integers(0, 10_000), world=st.integers(2, 12), dtype=DTYPES, spread=st.integers(0, 12),
    before=st.booleans(),
)  # fmt: skip
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


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_a_loss_that_was_negated_is_owed_what_any_other_is(wire: torch.dtype | None) -> None:
    shards = shards_of(1, 3, 100, torch.float32, 4)
    plain = interval(shards, [0.5, 0.25, 0.25], rescaled=True, wire=wire)
    for signs in ((-1, -1, -1), (-1, 1, 1)):  # of all ranks, or of one alone
        seen = [sign * shard for sign, shard in zip(signs, shards, strict=True)]
        weights = [s * w for s, w in zip(signs, (0.5, 0.25, 0.25), strict=True)]
        back = interval(seen, weights, rescaled=True, wire=wire)
        assert torch.equal(back.mean, plain.mean)
        assert torch.equal(back.bound, plain.bound)


WIRES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(
    seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    dtype=DTYPES, wire=WIRES,
    how=st.sampled_from(["divide-before", "divide-after", "multiply-before"]),
)  # fmt: skip
def test_what_travels_rounded_is_within_the_wires_bound(
    seed: int, sizes: list[int], dtype: torch.dtype, wire: torch.dtype, how: str
) -> None:
    world, total = len(sizes), sum(sizes)
    shards = shards_of(seed, world, 50, dtype, 3)
    known = interval(shards, [n / total for n in sizes], wire=wire)
    parts = [(s * (n * world / total)).to(wire) for s, n in zip(shards, sizes, strict=True)]
    if how == "divide-before":
        parts = [part / world for part in parts]
    elif how == "multiply-before":
        parts = [part * (1 / world) for part in parts]
    actual = add_in_some_order(parts, random.Random(seed)).to(dtype)
    if how == "divide-after":
        actual = actual / world
    assert bool(((actual.double() - known.mean).abs() <= known.bound).all())


@given(
    seed=st.integers(0, 10_000), sizes=st.lists(st.integers(4, 90), min_size=1, max_size=8),
    passes=st.integers(1, 4), dtype=DTYPES, wire=st.none() | WIRES, every=st.booleans(),
)  # fmt: skip
def test_whoever_exchanges_in_every_backward_is_within_the_bound(
    seed: int, sizes: list[int], passes: int, dtype: torch.dtype, wire: torch.dtype | None,
    every: bool,
) -> None:  # fmt: skip
    """And whoever does so once; stretches of a shard cancel here in half of their elements."""
    world, total, order = len(sizes), sum(sizes), random.Random(seed)
    stretches = [shards_of(seed + a, world, 50, dtype, 3) for a in range(passes)]
    for a in range(1, passes, 2):
        for rank in range(world):
            stretches[a][rank][:25] = -stretches[a - 1][rank][:25] * 1.01
    own = [sum(parts[1:], parts[0]) for parts in zip(*stretches, strict=True)]
    known = interval(
        own, [n / total for n in sizes], wire=wire, passes=passes,
        magnitudes=[sum(p.abs().double() for p in parts) for parts in zip(*stretches, strict=True)],
    )  # fmt: skip

    def mean(gradients: list[torch.Tensor]) -> torch.Tensor:
        weighted = [g * (n * world / total) for g, n in zip(gradients, sizes, strict=True)]
        sent = [g.to(wire or dtype) for g in weighted]
        return add_in_some_order(sent, order).to(dtype) / world

    actual = mean(own)
    if every:
        actual = mean(stretches[0])
        for parts in stretches[1:]:
            actual = mean([actual + part for part in parts])
    assert bool(((actual.double() - known.mean).abs() <= known.bound).all())


def test_two_backward_passes_are_bounded_by_little_more_than_twice_as_much() -> None:
    first, second = (shards_of(seed, 4, 100, torch.float32, 2) for seed in (1, 2))
    own = [a.abs() + b.abs() for a, b in zip(first, second, strict=True)]
    once = interval(own, [1 / 4] * 4)
    twice = interval(own, [1 / 4] * 4, passes=2, magnitudes=own)
    assert bool((twice.bound > 2 * once.bound).all())
    assert bool((twice.bound < 2.5 * once.bound).all())
    assert bool(((twice.mean * 1e-5).abs() > twice.bound).all())


def test_a_short_wire_is_still_a_bound() -> None:
    """For 4 ranks: 0.3 % of what a float16 wire carries, 2.4 % of a bfloat16 one."""
    shards = [shard.abs() for shard in shards_of(1, 4, 1000, torch.float32, 0)]
    for wire, share in ((torch.float16, 0.003), (torch.bfloat16, 0.025)):
        known = interval(shards, [1 / 4] * 4, wire=wire)
        assert share / 1.3 < float((known.bound / known.mean).max()) < share
        without_the_last = sum(s.double() for s in shards[:3]) / 4
        assert bool(((without_the_last - known.mean).abs() > known.bound).any())


def test_a_wider_wire_than_the_gradients_costs_two_roundings() -> None:
    shards = shards_of(1, 4, 100, torch.bfloat16, 2)
    plain, wide = (interval(shards, [1 / 4] * 4, wire=w) for w in (None, torch.float32))
    assert bool((plain.bound < wide.bound).all())
    assert bool((wide.bound < 1.5 * plain.bound).all())


@given(seed=st.integers(0, 1000), world=st.integers(2, 8), dtype=DTYPES)
def test_the_mean_is_exact_up_to_its_own_error(seed: int, world: int, dtype: torch.dtype) -> None:
    shards = shards_of(seed, world, 5, dtype, 3)
    known = interval(shards, [1 / world] * world)
    for i in range(5):
        exact = sum((Fraction(float(s[i])) for s in shards), Fraction()) / world
        largest = sum(abs(float(s[i])) for s in shards) / world
        assert abs(Fraction(float(known.mean[i])) - exact) <= Fraction(2 * world * largest) / 2**52


def test_roundings_of_the_weights_are_roundings_of_the_mean() -> None:
    """With the weights of `expectation`, for a loss that was scaled and is asked after as another:
    so many draws come above what the sum alone would owe.
    """
    order, unit, beyond = random.Random(0), 2.0**-53, 0
    most = gamma(reference_roundings(1, rescaled=True), unit)
    for _ in range(2000):
        size, rest, observed = order.randrange(1, 999), order.randrange(1, 999), order.random()
        here = size / (size + rest)
        share = 1.0 / (here * observed) * here
        shard = torch.rand(1, dtype=torch.float64) + 1
        known = interval([shard], [share], rescaled=True)
        exact = Fraction(float(shard)) / Fraction(observed)
        error = abs(Fraction(float(known.mean)) / exact - 1)
        assert error <= Fraction(most)
        assert float(known.bound / known.mean) >= gamma(6, unit) + most
        beyond += error > Fraction(gamma(2, unit))
    assert beyond > 0


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


@pytest.mark.parametrize("world", [128, 255, 300])  # gamma: above 1, infinite, negative
def test_where_roundings_come_to_all_that_is_summed_there_is_no_bound(world: int) -> None:
    shards = [torch.ones(1, dtype=torch.bfloat16)] * world
    with pytest.raises(NotBoundedError, match=r"may add up to all that is rounded"):
        interval(shards, [1 / world] * world)


def test_short_of_that_zero_is_outside() -> None:
    known = interval([torch.ones(1, dtype=torch.bfloat16)] * 126, [1 / 126] * 126)
    assert float(known.bound) < float(known.mean)


def test_gamma_is_highams() -> None:
    assert gamma(3, 2.0**-24) == 3 * 2.0**-24 / (1 - 3 * 2.0**-24)
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
