"""The optimizer did with the synchronised gradients what it does with them on one machine.

Gradients are judged on their own; here each rank's recorded gradients, parameters and optimizer
state go through the same optimizer in one process, and what comes out is owed to the bit. In
the lattice the parameters are known in closed form, whatever was recorded.
"""

from functools import partial

import torch

from distcheck.checks.comparison import bitwise, equal_numbers
from distcheck.checks.evidence import Evidence
from distcheck.checks.lattice_tensors import as_tensor
from distcheck.checks.matching import match_ranks
from distcheck.checks.tally import Tally
from distcheck.oracles.expectation import StepExpectation
from distcheck.oracles.shards import NotRecordedError
from distcheck.traces.layout import Kind

NAME = "parameters"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Parameters and optimizer state after every step."""
    if tally.layer == "lattice":
        for expectation in evidence.expectations:
            _compare_lattice(evidence, expectation, tally)
        return
    for expectation in evidence.expectations:
        reference = expectation.update
        updates: dict[bytes, dict[Kind, list[torch.Tensor | None]]] = {}
        for rank in evidence.ranks:
            inputs = reference.input_digest(rank, expectation.step)
            if inputs not in updates:
                try:
                    updates[inputs] = reference.run(rank, expectation.step)
                except NotRecordedError:
                    continue  # counted as not compared
            _compare_rank(evidence, rank, expectation.step, updates[inputs], tally)


def _compare_rank(
    evidence: Evidence,
    rank: int,
    step: int,
    after: dict[Kind, list[torch.Tensor | None]],
    tally: Tally,
) -> None:
    for kind, tensors in after.items():
        for index, expected in enumerate(tensors):
            match_ranks(
                tally,
                evidence.trace,
                kind=kind,
                slot=step + 1,
                step=step,
                index=index,
                ranks=[rank],
                compare=None if expected is None else partial(bitwise, expected=expected),
            )


def _compare_lattice(evidence: Evidence, expectation: StepExpectation, tally: Tally) -> None:
    for index, spec in enumerate(evidence.trace.layout.model.parameters):
        expected = as_tensor(spec, expectation.lattice.after[spec.name])
        match_ranks(
            tally,
            evidence.trace,
            kind=Kind.PARAMETER,
            slot=expectation.step + 1,
            step=expectation.step,
            index=index,
            ranks=evidence.ranks,
            compare=partial(equal_numbers, expected=expected),
        )
