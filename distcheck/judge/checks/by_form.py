"""From what a tensor may be to how it is compared."""

from dataclasses import replace
from functools import partial

import torch

from distcheck.judge.checks.comparison import (
    Comparison,
    Place,
    bitwise,
    by_norm,
    equal_numbers,
    within,
)
from distcheck.judge.checks.matching import Compare
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import Bits, Either, Form, Near, Numbers, Projection, Within
from distcheck.judge.oracles.low_rank import Projected, project


def comparison_with(form: Form | None, tally: Tally) -> Compare | None:
    """How a tensor is compared; None where there must be none. What is excused is said."""
    if form is None:
        return None
    if isinstance(form, Bits):
        return partial(bitwise, expected=form.expected)
    if isinstance(form, Numbers):
        return partial(equal_numbers, expected=form.expected)
    if isinstance(form, Within):
        nan = form.nan_is_expected
        return partial(within, expected=form.mean, bound=form.bound, nan_is_expected=nan)
    if isinstance(form, Near):
        return partial(_near, form)
    if isinstance(form, Projection):
        return partial(_as_projection, form)
    return partial(_either, form, tally)


def _near(form: Near, actual: torch.Tensor) -> Comparison:
    found = by_norm(actual, form.expected, form.tolerance, nan_is_expected=form.nan_is_expected)
    assert found.worst is not None, "a comparison by norm has one place"
    may_be_rounding = not found.ok and found.worst.error <= form.rounding
    return replace(found, undecided=form.why) if may_be_rounding else found


def projected(actual: torch.Tensor, form: Projection) -> Projected:
    """How one rank's result fits what went into its exchange."""
    return project(actual, form.given, rank=form.rank, world=form.world, unit=form.unit)


def _as_projection(form: Projection, actual: torch.Tensor) -> Comparison:
    return comparison_of(actual, form, projected(actual, form))


def comparison_of(actual: torch.Tensor, form: Projection, found: Projected) -> Comparison:
    """The same as a comparison of norms."""
    place = Place(
        index=(),
        actual=float(actual.double().norm()),
        expected=float(form.given.mean.norm()),
        error=found.error,
        bound=found.bound,
        ulp=None,
        unit="L2 norm",
    )
    return Comparison(not found.why, actual.numel(), place, place if found.why else None)


def _either(form: Either, tally: Tally, actual: torch.Tensor) -> Comparison:
    """As the first form has it; what that refuses, as the second has it."""
    first, second = (comparison_with(one, tally) for one in (form.first, form.second))
    assert first is not None
    assert second is not None
    found = first(actual)
    if found.ok:
        return found
    beside = second(actual)
    if form.excuse and not beside.ok:
        return found  # what is further from both is measured by the first
    if form.excuse:
        tally.excuse(form.excuse)
    return beside
