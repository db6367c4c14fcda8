"""What every rank's backward produced before anything was exchanged is that rank's own shard."""

from collections.abc import Callable
from functools import partial

import torch

from distcheck.checks.comparison import Comparison, bitwise, equal_numbers
from distcheck.checks.evidence import Evidence
from distcheck.checks.lattice_tensors import as_tensor
from distcheck.checks.matching import match_ranks
from distcheck.checks.tally import Tally
from distcheck.traces.layout import Kind

NAME = "local gradients"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise, per rank, against the shard computed again (X) or in closed form (lattice)."""
    specs = evidence.trace.layout.model.parameters
    for expectation in evidence.expectations:
        for position, rank in enumerate(evidence.with_data):
            for index, spec in enumerate(specs):
                same: Callable[..., Comparison] = bitwise
                expected: torch.Tensor | None
                if tally.layer == "lattice":
                    same = equal_numbers
                    expected = as_tensor(spec, expectation.lattice.local[position][spec.name])
                else:
                    expected = expectation.shards[position].gradients[index]
                match_ranks(
                    tally,
                    evidence.trace,
                    kind=Kind.LOCAL_GRADIENT,
                    slot=expectation.step,
                    step=expectation.step,
                    index=index,
                    ranks=[rank],
                    compare=None if expected is None else partial(same, expected=expected),
                )
