"""Where a right sum may be infinite, be none, or underflow: against sums in every order."""

import itertools

import pytest
import torch

from distcheck.checks.comparison import bitwise, by_norm, within
from distcheck.checks.simplest_mistakes import Parts, shown_by
from distcheck.oracles.full_batch import norm, underflow
from distcheck.oracles.overflow import Overflow, overflow
from distcheck.oracles.rounding import gamma, interval, unit_roundoff

INF, NAN = float("inf"), float("nan")
MOST = torch.finfo(torch.float32).max
UNIT = unit_roundoff(torch.float32)


def may_overflow(*ranks: float, divides_first: bool = False) -> Overflow | None:
    shards = [torch.tensor([value], dtype=torch.float32) for value in ranks]
    return overflow(
        shards,
        [1.0 / len(ranks)] * len(ranks),
        divides_first=divides_first,
        relative=gamma(len(ranks) + 9, UNIT),
        dtype=torch.float32,
    )


def allowed(found: Overflow | None) -> list[bool]:
    """For +infinity, -infinity, NaN and a number."""
    values = (INF, -INF, NAN, 1.0)
    if found is None:
        return [False] * len(values)
    return [bool(found.allows(torch.tensor([value]))[0]) for value in values]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((1.0, 2.0), [False] * 4),
        ((1e38, 1e38, 1e38), [False] * 4),
        ((1e38, 1e38, 1e38, 1e38), [True, False, False, False]),
        ((-3e38, -3e38), [False, True, False, False]),
        ((3e38, -3e38), [False] * 4),  # no partial sum is beyond either
        ((3e38, 3e38, -3e38), [True, False, False, False]),
        ((3e38, 3e38, -3e38, -3e38), [True, True, True, False]),
    ],
    ids=str,
)
def test_an_infinity_is_right_where_partial_sums_may_be_one(
    ranks: tuple[float, ...], expected: list[bool]
) -> None:
    assert allowed(may_overflow(*ranks)) == expected
    assert allowed(may_overflow(*ranks, divides_first=True)) == [False] * 4


def _sums(values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Every way to add these up two at a time, in this order."""
    if len(values) == 1:
        return [values[0]]
    return [
        left + right
        for at in range(1, len(values))
        for left in _sums(values[:at])
        for right in _sums(values[at:])
    ]


def test_no_order_gives_what_is_not_allowed() -> None:
    """Also with the values at the border, where rounding decides: every order of four ranks, and
    every way to put parentheses.
    """
    generator = torch.Generator().manual_seed(0)
    shards = torch.rand(4, 400, generator=generator) * 2 - 1
    shards *= MOST / 1.9
    shards[:, :100] = MOST / torch.tensor([2, 4, 8, 8]).unsqueeze(1) * (1 + 3 * UNIT)
    found = overflow(
        list(shards), [0.25] * 4, divides_first=False, relative=gamma(13, UNIT), dtype=shards.dtype
    )
    assert found is not None
    seen = torch.zeros(400, dtype=torch.bool)
    for order in itertools.permutations(shards.unbind()):
        for total in _sums(order):
            apart = ~total.isfinite()
            seen |= apart
            assert bool(found.allows(total)[apart].all())
    assert 100 < int(seen.sum()) < 400
    assert int(found.anywhere.sum()) < 400


def test_what_one_rank_has_is_no_overflow() -> None:
    """An infinity of a rank's own is expected as it is; the bound is 0 there."""
    known = interval([torch.tensor([INF, NAN, 1.0]), torch.tensor([1.0, 1.0, 1.0])], [0.5, 0.5])
    assert within(torch.tensor([INF, NAN, 1.0]), known.mean, known.bound).ok
    for wrong in ([-INF, NAN, 1.0], [INF, 1.0, 1.0], [NAN, NAN, 1.0], [INF, NAN, NAN]):
        assert not within(torch.tensor(wrong), known.mean, known.bound).ok
    assert may_overflow(INF, 1.0) is not None
    assert allowed(may_overflow(NAN, 1.0)) == [False] * 4


def test_one_nan_is_another_and_none_is_a_number() -> None:
    other = torch.tensor([0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert bool(other.isnan().all())
    nans = torch.tensor([NAN, NAN])
    assert bitwise(other, nans).ok
    assert by_norm(other, nans, 1.0).ok
    assert not bitwise(torch.tensor([NAN, 1.0]), nans).ok
    assert not by_norm(torch.tensor([NAN, 1.0]), nans, 1.0).ok
    assert not bitwise(torch.tensor([-0.0]), torch.tensor([0.0])).ok
    assert bitwise(torch.complex(other, other), torch.complex(nans, nans)).ok
    assert not bitwise(torch.tensor([1], dtype=torch.int64), torch.tensor([2])).ok


def test_the_scale_of_a_module_is_that_of_what_is_finite() -> None:
    assert norm(torch.tensor([3.0, INF, NAN, 4.0])) == 5.0


def test_nothing_is_claimed_of_what_is_not_finite() -> None:
    """A gradient that is NaN on every rank shows no mistake, so it does not count as compared."""
    gradients = torch.full((2, 3), NAN, dtype=torch.float64)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    bound = torch.zeros(3, dtype=torch.float64)
    parts = Parts(gradients=gradients, shares=half, own=half * 2, weights=half, bound=bound)
    found = shown_by(lambda stride: parts, elements=3, ranks=(0, 1))
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
        tolerance = underflow("S32", 256, elements)
        apart = float((mean.double() - whole.double()).norm())
        assert 0 < apart <= tolerance < float(mean.double().norm()) / 10
