"""Results that are infinite where the mean is not, and right so (`oracles/overflow.py`)."""

import torch

from distcheck.checks.comparison import Comparison
from distcheck.checks.matching import Compare
from distcheck.checks.tally import Tally
from distcheck.oracles.expectation import StepExpectation
from distcheck.oracles.overflow import Overflow, overflow
from distcheck.oracles.rounding import gamma, real_parts, unit_roundoff

_MOST_OTHER_ROUNDINGS = 9  # of a term, besides one for each rank (`oracles/rounding.py`)


def overflow_of(expectation: StepExpectation, index: int) -> Overflow | None:
    """Where one parameter's sum may overflow; None where it cannot, or a deviation is accepted."""
    known = expectation.overflows
    if index not in known:
        known[index] = _overflow_of(expectation, index)
    return known[index]


def _overflow_of(expectation: StepExpectation, index: int) -> Overflow | None:
    own = [shard.gradients[index] for shard in expectation.shards]
    like = next((gradient for gradient in own if gradient is not None), None)
    if like is None or expectation.accepted is not None:
        return None
    contract = expectation.contract
    wire = None if contract.wire is None else getattr(torch, contract.wire)
    dtype = wire or real_parts(like).dtype
    roundings = expectation.ingredients.training.accumulate * (len(own) + _MOST_OTHER_ROUNDINGS)
    return overflow(
        [torch.zeros_like(like) if gradient is None else gradient for gradient in own],
        expectation.shares,
        divides_first=contract.scale in ("divide-before", "multiply-before"),
        relative=gamma(roundings, unit_roundoff(dtype)),
        dtype=dtype,
    )


def or_overflowed(
    compare: Compare, expectation: StepExpectation, index: int, tally: Tally
) -> Compare:
    """As `compare` has it; elements that overflowed rightly count as the mean that they stand for:
    every other element is compared as it is.
    """
    over = overflow_of(expectation, index)
    interval = None if over is None else expectation.interval(index)
    if over is None or interval is None:
        return compare

    def but_for_those(actual: torch.Tensor) -> Comparison:
        allowed = over.allows(actual)
        if not bool(allowed.any()):
            return compare(actual)
        tally.excuse(
            "some sums are beyond the largest number of the dtype before they are divided: an "
            "infinity is right there, and so is the mean"
        )
        parts = real_parts(actual)
        filled = torch.where(allowed, interval.mean.to(parts.dtype), parts)
        return compare(torch.view_as_complex(filled) if actual.is_complex() else filled)

    return but_for_those
