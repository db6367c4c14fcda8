"""Comparing tensors: bits, bounds and norms, with everything a float can be."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.judge.checks.comparison import (
    compare_bitwise,
    compare_by_norm,
    compare_numbers,
    compare_within,
    ulp_distance,
)

NAN, INF = math.nan, math.inf


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_bits_tell_zeros_apart_and_know_nan() -> None:
    assert not compare_bitwise(t(0.0), t(-0.0)).ok
    assert compare_numbers(t(0.0), t(-0.0)).ok
    assert compare_bitwise(t(NAN, INF), t(NAN, INF)).ok


def test_bitwise_names_the_first_and_the_worst() -> None:
    expected = torch.arange(12.0).view(3, 4)
    actual = expected.clone()
    actual[1, 2] += 0.5
    actual[2, 0] -= 4
    comparison = compare_bitwise(actual, expected)
    assert not comparison.ok
    assert comparison.first is not None
    assert comparison.worst is not None
    assert comparison.first.index == (1, 2)
    assert (comparison.first.actual, comparison.first.expected) == (6.5, 6.0)
    assert comparison.worst.index == (2, 0)
    assert comparison.worst.error == 4


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "int64", "complex64", "bool"])
def test_bitwise_takes_every_dtype(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    ones = torch.ones(3, dtype=dtype)
    other = ones.clone()
    other[1] = 0
    assert compare_bitwise(ones, ones.clone()).ok
    assert compare_bitwise(ones, other).first is not None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    assert compare_bitwise(tensor, tensor.clone()).ok
    assert compare_within(tensor, tensor.double(), tensor.double()).ok
    assert compare_by_norm(tensor, tensor, 0.0).ok


def test_one_bit_in_a_scalar_is_found() -> None:
    one = torch.tensor(1.0)
    comparison = compare_bitwise(torch.nextafter(one, torch.tensor(2.0)), one)
    assert comparison.first is not None
    assert comparison.first.index == ()
    assert comparison.first.ulp == 1


@given(st.integers(0, 9), st.floats(1e-10, 1e-3))
def test_within_fails_exactly_outside_the_bound(position: int, bound: float) -> None:
    expected = torch.zeros(10, dtype=torch.float64)
    limits = torch.full((10,), bound, dtype=torch.float64)
    actual = expected.clone()
    actual[position] = bound
    assert compare_within(actual, expected, limits).ok
    actual[position] = math.nextafter(bound, 1)
    comparison = compare_within(actual, expected, limits)
    assert comparison.first is not None
    assert comparison.first.index == (position,)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nothing_nonfinite_is_within_a_bound(bad: float) -> None:
    expected, bound = t(1.0, 2.0).double(), t(0.1, 0.1).double()
    comparison = compare_within(t(1.0, bad), expected, bound)
    assert not comparison.ok
    assert comparison.worst is not None
    assert comparison.worst.index == (1,)


def test_an_infinite_expectation_hides_nothing() -> None:
    infinite = t(INF).double()
    assert not compare_within(t(1.0), infinite, t(0.1).double()).ok
    assert not compare_within(t(1.0), t(NAN).double(), t(NAN).double()).ok


@pytest.mark.parametrize("bad", [-1.0, -INF, INF, NAN])
@pytest.mark.parametrize("beside", [1.0, 0.0])
def test_nothing_is_within_what_is_no_bound(bad: float, beside: float) -> None:
    expected, bound = t(1.0, 2.0).double(), t(beside, bad).double()
    for actual in (t(1.0, 1e6), t(1.0, 2.0)):
        comparison = compare_within(actual, expected, bound)
        assert not comparison.ok
        assert comparison.first is not None
        assert comparison.first.index == (1,)
    assert not compare_by_norm(t(1.0, 1e6), t(1.0, 2.0), bad).ok


def test_a_bound_of_negative_zero_is_one_of_zero() -> None:
    assert not compare_within(t(1.0), t(0.0).double(), t(-0.0).double()).ok
    assert compare_within(t(1.0), t(1.0).double(), t(-0.0).double()).ok


def test_norms() -> None:
    expected = t(3.0, 4.0)
    assert compare_by_norm(expected + 0.01, expected, 0.02).ok
    assert not compare_by_norm(expected + 0.1, expected, 0.02).ok
    assert not compare_by_norm(t(NAN, 4.0), expected, 1e9).ok


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_ulp_distance_counts_floats(value: float) -> None:
    start = torch.tensor(value)
    up = start.clone()
    for steps in range(1, 4):
        up = torch.nextafter(up, torch.tensor(INF))
        if math.isinf(float(up)):
            return
        # -0 and +0 are one number
        assert ulp_distance(float(up), value, torch.float32) == steps


def test_ulp_distance_of_other_dtypes() -> None:
    assert ulp_distance(1 + 2**-7, 1.0, torch.bfloat16) == 1
    assert ulp_distance(1 + 2**-10, 1.0, torch.float16) == 1
    assert ulp_distance(1 + 2**-52, 1.0, torch.float64) == 1
    assert ulp_distance(1.0, NAN, torch.float32) is None
    assert ulp_distance(1e300, 1.0, torch.float32) is None
    assert ulp_distance(1.0, 2.0, torch.int64) is None


def test_within_shows_what_fails_worst_first_as_a_share_of_its_bound() -> None:
    expected = torch.zeros(5, dtype=torch.float64)
    actual = torch.tensor([0.5, 4.0, 3.0, 1e-6, 0.0])
    bound = torch.tensor([1.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    found = compare_within(actual, expected, bound)
    assert not found.ok
    assert found.first is not None
    assert (found.first.index, found.first.error, found.first.bound) == ((1,), 4.0, 2.0)
    # Beyond a bound of zero is beyond measure; within it, as the last one is, is nothing.
    assert found.worst is not None
    assert (found.worst.index, found.worst.bound) == ((3,), 0.0)


def test_within_a_bound_has_a_closest_and_no_failure() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = compare_within(
        torch.tensor([1.0, 2.5, 3.25]), expected, torch.tensor([0.0, 1.0, 0.25]).double()
    )
    assert found.ok
    assert found.worst is not None
    assert (found.worst.index, found.worst.error, found.worst.bound) == ((2,), 0.25, 0.25)
    assert found.first is None
    assert compare_within(torch.zeros(2), torch.zeros(2).double(), torch.zeros(1).double()).ok


def test_a_norm_that_fails_is_a_place_of_the_whole_tensor() -> None:
    fails = compare_by_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), 4.9)
    assert not fails.ok
    assert fails.first is not None
    assert (fails.first.index, fails.first.error, fails.first.unit) == ((), 5.0, "L2 norm")
    assert fails.worst == fails.first
    passes = compare_by_norm(torch.tensor([3.0, 4.0]), torch.zeros(2), 5.0)
    assert (passes.ok, passes.first) == (True, None)


def test_complex_numbers_differ_by_the_distance_of_their_parts() -> None:
    found = compare_bitwise(torch.tensor([1 + 1j, 4 + 5j]), torch.tensor([1 + 1j, 1 + 1j]))
    assert not found.ok
    assert found.worst is not None
    assert (found.worst.index, found.worst.error) == ((1,), 5.0)


def test_numbers_of_both_signs_are_in_order() -> None:
    least = 2.0**-149
    assert ulp_distance(least, -least, torch.float32) == 2
    assert ulp_distance(0.0, -0.0, torch.float32) == 0
    assert ulp_distance(-1.0, 1.0, torch.float32) == -ulp_distance(1.0, -1.0, torch.float32)  # type: ignore[operator]
