"""Every rank computed the loss of its own shard, and their weighted mean is the batch's loss."""

from collections.abc import Sequence

import torch

from distcheck.judge.checks.comparison import bitwise, by_norm
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.forms import MeanLoss, RankLosses


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise per rank (X, lattice), or the weighted mean against the full batch (S32, S64)."""
    for expectation in evidence.expectations:
        if not all(header.written for header in expectation.headers):
            continue
        if isinstance(expectation.what, MeanLoss):
            _compare_mean(evidence, expectation, expectation.what, tally)
        else:
            _compare_ranks(evidence, expectation, expectation.what, tally)


def _compare_ranks(
    evidence: Evidence, expectation: Expectation, losses: RankLosses, tally: Tally
) -> None:
    for position, rank in enumerate(evidence.with_data):
        actual = _scalar(expectation.headers[position].loss)
        comparison = bitwise(actual, _scalar(losses.expected[position]))
        if not comparison.ok and losses.beside:
            comparison = bitwise(actual, _scalar(losses.beside[position]))
        if not comparison.ok and losses.within:
            near = by_norm(actual, _scalar(losses.expected[position]), losses.within[position])
            comparison = near if near.ok else comparison
            if near.ok:
                tally.excuse(losses.excuse)
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)
    bound = max(losses.within, default=0.0)
    _sum_up(expectation, tally, expected=_mean(expectation, losses.expected), bound=bound)


def _compare_mean(
    evidence: Evidence, expectation: Expectation, expected: MeanLoss, tally: Tally
) -> None:
    mean = _mean(expectation, [header.loss for header in expectation.headers])
    comparison = by_norm(_scalar(mean), _scalar(expected.expected), expected.bound)
    if not comparison.ok and expected.beside is not None:
        beside = by_norm(_scalar(mean), _scalar(expected.beside), expected.bound)
        comparison = beside if beside.ok else comparison
        if beside.ok:
            tally.excuse(expected.excuse)
    _sum_up(expectation, tally, expected=expected.expected, bound=expected.bound)
    for rank in evidence.with_data:
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)


def _mean(expectation: Expectation, losses: Sequence[float]) -> float:
    """The ranks' losses, weighted by their samples."""
    sizes = [len(header.ids) for header in expectation.headers]
    weights = [size * len(sizes) / sum(sizes) for size in sizes]
    pairs = zip(losses, weights, strict=True)
    return sum(loss * weight / len(losses) for loss, weight in pairs)


def _sum_up(expectation: Expectation, tally: Tally, *, expected: float, bound: float) -> None:
    losses = [header.loss for header in expectation.headers]
    mean = _mean(expectation, losses)
    tally.sums.add_losses(expectation.step, losses, mean=mean, expected=expected, bound=bound)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value + 0.0, dtype=torch.float64)
