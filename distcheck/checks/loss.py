"""Every rank computed the loss of its own shard, and their weighted mean is the batch's loss."""

import torch

from distcheck.checks.comparison import bitwise, by_norm
from distcheck.checks.evidence import Evidence
from distcheck.checks.tally import Tally
from distcheck.oracles.expectation import StepExpectation
from distcheck.oracles.full_batch import loss_tolerance

NAME = "loss"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise per rank (X, lattice), or the weighted mean against the full batch (S32, S64)."""
    for expectation in evidence.expectations:
        if not all(header.written for header in expectation.headers):
            continue
        if tally.layer in ("S32", "S64"):
            _compare_mean(expectation, tally)
        else:
            _compare_ranks(expectation, tally)


def _compare_ranks(expectation: StepExpectation, tally: Tally) -> None:
    for rank, header in enumerate(expectation.headers):
        if tally.layer == "lattice":
            expected = float(expectation.lattice.losses[rank])
        else:
            expected = expectation.shards[rank].loss
        comparison = bitwise(_scalar(header.loss), _scalar(expected))
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)


def _compare_mean(expectation: StepExpectation, tally: Tally) -> None:
    world = len(expectation.headers)
    mean = sum(
        header.loss * weight / world
        for header, weight in zip(expectation.headers, expectation.weights, strict=True)
    )
    expected = expectation.full_batch.loss
    comparison = by_norm(_scalar(mean), _scalar(expected), loss_tolerance(tally.layer, expected))
    for rank in range(world):
        tally.add(comparison, parameter="loss", rank=rank, step=expectation.step)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value + 0.0, dtype=torch.float64)
