"""Every rank computed the loss of its own shard, and their weighted mean is the batch's loss."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from distcheck.judge.checks.comparison import bitwise, by_norm
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import Compare
from distcheck.judge.checks.rounded_sums import or_from_recorded
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.full_batch import loss_tolerance
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise per rank (X, lattice), or the weighted mean against the full batch (S32, S64)."""
    for expectation in evidence.expectations:
        if not all(header.written for header in expectation.headers):
            continue
        if tally.layer in (IN_FLOAT32, IN_FLOAT64):
            _compare_mean(evidence, expectation, tally)
        else:
            _compare_ranks(evidence, expectation, tally)


def _compare_ranks(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    required = []
    for position, rank in enumerate(evidence.with_data):
        header = expectation.headers[position]
        if tally.layer == "lattice":
            expected = float(expectation.lattice.losses[position])
        else:
            expected = expectation.shards[position].loss
        required.append(expected)
        compare: Compare = partial(bitwise, expected=_scalar(expected))
        if tally.layer == "lattice":
            beside = partial(_computed_again, expectation, position)
            compare = or_from_recorded(compare, expectation, beside)
        comparison = compare(_scalar(header.loss))
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)
    _sum_up(expectation, tally, expected=_mean(expectation, required), bound=0.0)


def _computed_again(expectation: StepExpectation, position: int) -> Compare:
    return partial(bitwise, expected=_scalar(expectation.shards[position].loss))


def _compare_mean(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    mean = _mean(expectation, [header.loss for header in expectation.headers])
    expected = expectation.full_batch.loss
    bound = loss_tolerance(tally.layer, expected)
    if bound < abs(mean - expected) < math.inf:  # terms of both signs may have cancelled in it
        bound = loss_tolerance(tally.layer, expectation.loss_magnitude)
    comparison = by_norm(_scalar(mean), _scalar(expected), bound)
    _sum_up(expectation, tally, expected=expected, bound=bound)
    for rank in evidence.with_data:
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)


def _mean(expectation: StepExpectation, losses: Sequence[float]) -> float:
    """The ranks' losses, weighted by their samples."""
    pairs = zip(losses, expectation.weights, strict=True)
    return sum(loss * weight / len(losses) for loss, weight in pairs)


def _sum_up(expectation: StepExpectation, tally: Tally, *, expected: float, bound: float) -> None:
    losses = [header.loss for header in expectation.headers]
    mean = _mean(expectation, losses)
    tally.sums.add_losses(expectation.step, losses, mean=mean, expected=expected, bound=bound)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value + 0.0, dtype=torch.float64)
