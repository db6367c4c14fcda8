"""Running statistics and other buffers moved as one machine's would, shard by shard.

Where a forward pass starts from is part of the contract: each rank's own buffers, or rank 0's. A
strategy that promises nothing may do either.
"""

from functools import partial

import torch

from distcheck.checks.comparison import bitwise
from distcheck.checks.evidence import Evidence
from distcheck.checks.matching import match_ranks
from distcheck.checks.tally import Tally
from distcheck.oracles.expectation import StepExpectation
from distcheck.traces.layout import Kind

NAME = "buffers"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise, per rank, against the shard's forward pass computed again."""
    for expectation in evidence.expectations:
        for position, rank in enumerate(evidence.with_data):
            for index, expected in enumerate(_expected(evidence, expectation, rank, position)):
                match_ranks(
                    tally,
                    evidence.trace,
                    kind=Kind.BUFFER,
                    slot=expectation.step + 1,
                    step=expectation.step,
                    index=index,
                    ranks=[rank],
                    compare=partial(bitwise, expected=expected),
                )


def _expected(
    evidence: Evidence, expectation: StepExpectation, rank: int, position: int
) -> list[torch.Tensor]:
    """The way that the rank's buffers went, where two are allowed; else the first."""
    slot = expectation.step + 1
    layout = evidence.trace.layout
    actual = [
        evidence.trace.tensor(rank, Kind.BUFFER, slot, index)
        for index in range(len(layout.model.buffers))
    ]
    ways = expectation.buffers(position)
    for way in ways[1:]:
        if all(a is not None and torch.equal(a, e) for a, e in zip(actual, way, strict=True)):
            return way
    return ways[0]
