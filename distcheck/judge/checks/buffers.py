"""Running statistics and other buffers equal those of a single process, shard by shard.

The contract defines the buffers at the start of a forward pass: those of the rank, or those of rank
0. Without a promise, both are allowed. After forward, a strategy may also copy one rank's buffer to
all ranks, bitwise, or average it over the ranks, evenly or by samples, within the bound of a mean
(`oracles/rounding.py`). Code that communicates in forward must leave the buffers of the full batch
on every rank.
"""

from collections.abc import Sequence
from functools import partial

import torch

from distcheck.judge.checks.comparison import compare_bitwise, compare_within
from distcheck.judge.checks.evidence import Evidence, Expectation
from distcheck.judge.checks.matching import Compare, comparison_for_form, match_ranks
from distcheck.judge.checks.sensitivity import mistakes_shown_by_buffers
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles import rounding
from distcheck.judge.oracles.forms import AllowedBuffers, FullBatchBuffers
from distcheck.recordings.recording import Kind


def compare(evidence: Evidence, tally: Tally) -> None:
    """Compare each rank bitwise with the recomputed forward pass of its shard."""
    for expectation in evidence.expectations:
        if isinstance(expectation.what, FullBatchBuffers):
            _compare_batch(evidence, expectation, expectation.what, tally)
            continue
        for position, rank in enumerate(evidence.with_data):
            for index, expected in enumerate(
                _best_expectation(evidence, expectation, rank, position)
            ):
                compare_with = _comparison(evidence, expectation, tally, rank, index, expected)
                match_ranks(
                    tally, evidence.trace, Kind.BUFFER, expectation.step, index,
                    ranks=[rank], compare=compare_with,
                )  # fmt: skip


def _compare_batch(
    evidence: Evidence, expectation: Expectation, after: FullBatchBuffers, tally: Tally
) -> None:
    """Compare every rank with the full batch in a single process, if that changes any buffer."""
    specs = evidence.trace.layout.model.buffers
    shown = mistakes_shown_by_buffers(after)
    for index, near in enumerate(after.buffers):
        if any(one.counts for one in shown):
            name, step = specs[index].name, expectation.step
            tally.record_revealed(shown[index], parameter=name, step=step)
        match_ranks(
            tally, evidence.trace, Kind.BUFFER, expectation.step, index,
            ranks=evidence.holding, compare=comparison_for_form(near, tally),
        )  # fmt: skip


def _comparison(
    evidence: Evidence,
    expectation: Expectation,
    tally: Tally,
    rank: int,
    index: int,
    expected: torch.Tensor,
) -> Compare:
    """Compare bitwise, unless the buffer is the mean over the ranks' forward passes."""
    actual = evidence.trace.tensor(rank, Kind.BUFFER, expectation.step + 1, index)
    to_the_bit = partial(compare_bitwise, expected=expected)
    if actual is None or not evidence.contract.takes_any_buffers or torch.equal(actual, expected):
        return to_the_bit
    ways: AllowedBuffers = expectation.what
    left = [of_rank[0][index] for of_rank in ways.ways]
    if (source := _sent_by(evidence, expectation, index, left)) is not None:
        tally.remark("after the forward pass one rank's buffers are broadcast to every rank")
        return partial(compare_bitwise, expected=source)
    if not actual.is_floating_point() or actual.itemsize == 1:  # no known rounding
        return to_the_bit
    even = [1.0 / len(left)] * len(left)
    for shares in (even, [weight / len(left) for weight in ways.shares.weights]):
        mean = rounding.interval(left, shares)
        if compare_within(actual, mean.mean, mean.bound).ok:
            tally.remark(
                "buffers are averaged over the ranks after the forward pass, and compared with "
                "the mean of the ranks' local buffers within the rounding of a mean"
            )
            return partial(compare_within, expected=mean.mean, bound=mean.bound)
    return to_the_bit


def _sent_by(
    evidence: Evidence, expectation: Expectation, index: int, left: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the buffer of one rank's forward pass if every rank holds it after the step."""
    slot = expectation.step + 1
    held = [evidence.trace.tensor(rank, Kind.BUFFER, slot, index) for rank in evidence.with_data]
    for one in left:
        if all(tensor is not None and torch.equal(tensor, one) for tensor in held):
            return one
    return None


def _best_expectation(
    evidence: Evidence, expectation: Expectation, rank: int, position: int
) -> tuple[torch.Tensor, ...]:
    """Return the allowed expectation that the rank's buffers match, or the first one."""
    actual = evidence.trace.tensors(rank, Kind.BUFFER, expectation.step + 1)
    of_rank: tuple[tuple[torch.Tensor, ...], ...] = expectation.what.ways[position]
    for way in of_rank[1:]:
        if all(a is not None and torch.equal(a, e) for a, e in zip(actual, way, strict=True)):
            return way
    return of_rank[0]
