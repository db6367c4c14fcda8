"""After the sync every rank holds the gradient of the whole batch: the check that matters most.

lattice   bitwise, against the closed form (or, where no order is promised, within R)
X         bitwise, against the shards reduced in the declared order
R         elementwise, within the rounding bound of any order (or, where a low-rank exchange is
          accepted, as a projection of the mean)
S32, S64  per tensor, relative L2 norm against the whole batch in one process (S32: where rounding
          decides on which side of a kink a sample is, taken shard by shard)
"""

from functools import partial

import torch

from distcheck.judge.acceptance import COMPRESSED
from distcheck.judge.checks import rounded_sums, sensitivity
from distcheck.judge.checks.comparison import (
    Comparison,
    Place,
    bitwise,
    by_norm,
    equal_numbers,
    within,
)
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import Compare, match_ranks
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.inexact_sums import exact_gradient
from distcheck.records import TensorSpec
from distcheck.records.expected_events import NotFinite
from distcheck.records.layers import BITWISE, IN_FLOAT32, IN_FLOAT64, ROUNDING
from distcheck.training.traces.layout import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Every parameter of every rank."""
    for expectation in evidence.expectations:
        if expectation.averages is not None:
            _compare_own(evidence, expectation, tally)
            continue
        if tally.layer == ROUNDING and expectation.lost:
            tally.remark(expectation.lost)
        kept: list[float] = []
        for index, spec in enumerate(evidence.trace.layout.model.parameters):
            _note_sensitivity(evidence, expectation, tally, index)
            match_ranks(
                tally,
                evidence.trace,
                kind=Kind.GRADIENT,
                slot=expectation.step,
                step=expectation.step,
                index=index,
                ranks=evidence.holding,
                compare=_comparison(expectation, tally, index, spec, kept),
                zero_will_do=True,
            )
        _remark_on_rank(expectation, kept, tally)
        if tally.layer in (IN_FLOAT32, IN_FLOAT64):
            _remark_on_full_batch(expectation, tally)
        if tally.layer == "lattice":
            rounded_sums.remark(expectation, tally)


def _note_sensitivity(
    evidence: Evidence, expectation: StepExpectation, tally: Tally, index: int
) -> None:
    """Which of the simplest mistakes the comparison that follows would show."""
    if tally.layer == ROUNDING and _is_low_rank(expectation):
        found = sensitivity.of_projection(evidence, expectation, index)
    else:
        found = sensitivity.of_mean(evidence, expectation, tally.layer, index)
    if found is not None:
        name = evidence.trace.layout.model.parameters[index].name
        tally.would_show(found, parameter=name, step=expectation.step)


def _is_low_rank(expectation: StepExpectation) -> bool:
    accepted = expectation.accepted
    return accepted is not None and accepted.family == "low-rank"


def _compare_own(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    """Ranks that train by themselves: each must hold its own shard's, bit for bit."""
    for rank in evidence.ranks:
        for index, own in enumerate(expectation.shards[rank].gradients):
            match_ranks(
                tally,
                evidence.trace,
                kind=Kind.GRADIENT,
                slot=expectation.step,
                step=expectation.step,
                index=index,
                ranks=[rank],
                compare=None if own is None else partial(bitwise, expected=own),
            )


def _comparison(
    expectation: StepExpectation, tally: Tally, index: int, spec: TensorSpec, kept: list[float]
) -> Compare | None:
    layer = tally.layer
    if layer == "lattice":
        exact = partial(equal_numbers, expected=exact_gradient(expectation, index))
        return rounded_sums.or_within_rounding(exact, expectation, index)
    if layer == BITWISE:
        promised = expectation.order_exact[index]
        return None if promised is None else partial(bitwise, expected=promised)
    if layer == ROUNDING and _is_low_rank(expectation):
        given = expectation.carried(index)
        if given is None:
            return None

        def as_projection(actual: torch.Tensor) -> Comparison:
            found = expectation.projected(actual, given)
            kept.append(found.kept)
            if found.why:
                tally.remark(f"{spec.name} at step {expectation.step} is {found.why}")
            place = Place(
                index=(),
                actual=float(actual.double().norm()),
                expected=float(given.mean.norm()),
                error=found.error,
                bound=found.bound,
                ulp=None,
                unit="L2 norm",
            )
            return Comparison(not found.why, actual.numel(), place, place if found.why else None)

        return as_projection
    if layer == ROUNDING:
        interval = expectation.interval(index)
        if interval is None:
            return None
        nan = _nan_is_expected(expectation)
        mean, bound = interval.mean, interval.bound
        return partial(within, expected=mean, bound=bound, nan_is_expected=nan)
    full = expectation.owed_by_full_batch(index)
    if full is None:
        return None
    tolerance = expectation.full_batch_tolerance(layer, index)
    nan = _nan_is_expected(expectation)
    against = partial(by_norm, expected=full, tolerance=tolerance, nan_is_expected=nan)
    return (
        against if layer == IN_FLOAT64 else partial(_at_a_kink, against, expectation, tally, index)
    )


def _nan_is_expected(expectation: StepExpectation) -> bool:
    """Whether the workload declares gradients that are not finite. In any other, a NaN shows that
    something went wrong before the exchange or in it, and compares as nothing.
    """
    return any(isinstance(event, NotFinite) for event in expectation.ingredients.must_happen)


def _at_a_kink(
    against: Compare,
    expectation: StepExpectation,
    tally: Tally,
    index: int,
    actual: torch.Tensor,
) -> Comparison:
    """As `against` the whole batch has it; what that refuses may be within the same tolerance of
    the shards' mean, and that the whole batch's gradient in all but rounding: see full_batch.py.
    """
    found = against(actual)
    mean = None if found.ok else expectation.shard_by_shard(index)
    if mean is None:
        return found
    beside = by_norm(actual, mean, expectation.full_batch_tolerance(IN_FLOAT32, index))
    if not beside.ok or not expectation.shards_are_the_batch(index):
        return found
    tally.excuse(
        "at some steps rounding decides on which side of a kink (of a ReLU, of a maximum) a sample "
        "is: there the whole batch is taken shard by shard, which in float64 is the same"
    )
    return beside


def _remark_on_rank(expectation: StepExpectation, kept: list[float], tally: Tally) -> None:
    """How much of a gradient a low-rank exchange kept; that is not judged."""
    compressed = [share for share in kept if share < 1.0]
    if compressed:
        least, most = (f"{100 * share:.2g}" for share in (min(compressed), max(compressed)))
        tally.remark(
            f"step {expectation.step}: {len(compressed)} of {len(kept)} {COMPRESSED}, {least} to "
            f"{most} % of their norm kept"
        )


def _remark_on_full_batch(expectation: StepExpectation, tally: Tally) -> None:
    if expectation.step == 0 and expectation.full_batch.ghost:
        whole = len(expectation.normalised_sizes) == len(expectation.headers)
        stretches = "shard" if whole else "micro-batches"
        sizes = ", ".join(map(str, expectation.normalised_sizes))
        tally.remark(
            "BatchNorm: expected is the ghost batch, in which each rank normalises its own "
            f"{stretches} ({sizes}). It is {expectation.ghost_distance():.2f} (relative L2) from "
            "full-batch training, which no gradient sync can change"
        )
