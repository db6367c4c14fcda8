"""Gradients that are infinite, that are no numbers, or that underflow."""

from functools import partial

import torch

from distcheck.judge.checks.comparison import compare_bitwise, compare_by_norm, compare_within
from distcheck.judge.checks.sensitivity import MeanSummands, mistakes_shown_by_sum
from distcheck.judge.oracles.full_batch import finite_norm, underflow_error
from distcheck.judge.oracles.rounding import interval

INF, NAN = float("inf"), float("nan")


def test_what_one_rank_has_is_expected_as_it_is() -> None:
    """An infinity of a rank's own; a NaN where it is expected. The bound is 0 there."""
    known = interval([torch.tensor([INF, NAN, 1.0]), torch.tensor([1.0, 1.0, 1.0])], [0.5, 0.5])
    compare = partial(compare_within, expected=known.mean, bound=known.bound)
    right = torch.tensor([INF, NAN, 1.0])
    assert compare(right, nan_is_expected=True).ok
    assert not compare(right).ok
    for wrong in ([-INF, NAN, 1.0], [INF, 1.0, 1.0], [NAN, NAN, 1.0], [INF, NAN, NAN]):
        assert not compare(torch.tensor(wrong), nan_is_expected=True).ok


def test_a_sum_that_overflows_is_not_the_mean() -> None:
    """What adds up before it divides leaves an infinity, and the mean is a number."""
    shards = [torch.full((1,), 3e38), torch.full((1,), 3e38)]
    known = interval(shards, [0.5, 0.5])
    assert compare_within((shards[0] / 2) + (shards[1] / 2), known.mean, known.bound).ok
    assert not compare_within((shards[0] + shards[1]) / 2, known.mean, known.bound).ok


def test_one_nan_is_another_and_none_is_a_number() -> None:
    other = torch.tensor([0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(other.isnan().all())
    nans = torch.tensor([NAN, NAN])
    assert compare_bitwise(other, nans).ok
    assert compare_by_norm(other, nans, 1.0, nan_is_expected=True).ok
    assert not compare_by_norm(other, nans, 1.0).ok
    assert not compare_bitwise(torch.tensor([NAN, 1.0]), nans).ok
    assert not compare_by_norm(torch.tensor([NAN, 1.0]), nans, 1.0, nan_is_expected=True).ok
    assert not compare_bitwise(torch.tensor([-0.0]), torch.tensor([0.0])).ok
    assert compare_bitwise(torch.complex(other, other), torch.complex(nans, nans)).ok
    assert not compare_bitwise(torch.tensor([1], dtype=torch.int64), torch.tensor([2])).ok


def test_the_scale_of_a_module_is_that_of_what_is_finite() -> None:
    assert finite_norm(torch.tensor([3.0, INF, NAN, 4.0])) == 5.0


def test_nothing_is_claimed_of_what_is_not_finite() -> None:
    """A gradient that is NaN on every rank shows no mistake, so it does not count as compared."""
    gradients = torch.full((2, 3), NAN, dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    bound = torch.zeros(3, dtype=torch.float64)
    parts = MeanSummands(gradients=gradients, shares=half, own=half * 2, weights=half, bound=bound)
    found = mistakes_shown_by_sum(lambda stride: parts, elements=3, ranks=(0, 1))
    assert not found.counts
    assert found.scale == "inf"


def test_terms_that_underflow_are_within_what_is_allowed_for_them() -> None:
    """Products of denormal size, added up in two shards and in one batch."""
    generator = torch.Generator().manual_seed(0)
    for elements in (1, 50):
        terms = torch.rand(256, elements, generator=generator) * 1e-40
        whole = (terms * (1.0 / 256)).sum(0)
        shards = [(part * (1.0 / 128)).sum(0) for part in terms.split(128)]
        mean = (shards[0] + shards[1]) / 2
        tolerance = underflow_error("full batch float32", 256, elements)
        apart = float((mean.double() - whole.double()).norm())
        assert 0 < apart <= tolerance < float(mean.double().norm()) / 10
