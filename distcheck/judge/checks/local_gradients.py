"""What every rank's backward produced before anything was exchanged is that rank's own shard."""

from functools import partial

from distcheck.judge.checks.comparison import bitwise, equal_numbers
from distcheck.judge.checks.evidence import Evidence
from distcheck.judge.checks.matching import Compare, match_ranks
from distcheck.judge.checks.rounded_sums import or_from_recorded
from distcheck.judge.checks.tally import Tally
from distcheck.judge.oracles.expectation import StepExpectation
from distcheck.judge.oracles.lattice_tensors import as_tensor
from distcheck.training.traces.layout import Kind, State


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise, per rank, against the shard computed again (X) or in closed form (lattice)."""
    specs = evidence.trace.layout.model.parameters
    for expectation in evidence.expectations:
        for position, rank in enumerate(evidence.with_data):
            for index, spec in enumerate(specs):
                same: Compare | None
                if tally.layer == "lattice":
                    expected = as_tensor(spec, expectation.lattice.local[position][spec.name])
                    same = or_from_recorded(
                        partial(equal_numbers, expected=expected),
                        expectation,
                        partial(_computed_again, expectation, position, index),
                    )
                else:
                    same = _computed_again(expectation, position, index)
                _note_unseen(evidence, tally, rank, expectation.step, index)
                match_ranks(
                    tally,
                    evidence.trace,
                    kind=Kind.LOCAL_GRADIENT,
                    slot=expectation.step,
                    step=expectation.step,
                    index=index,
                    ranks=[rank],
                    compare=same,
                )


def _computed_again(expectation: StepExpectation, position: int, index: int) -> Compare | None:
    expected = expectation.shards[position].gradients[index]
    return None if expected is None else partial(bitwise, expected=expected)


def _note_unseen(evidence: Evidence, tally: Tally, rank: int, step: int, index: int) -> None:
    """Says once that a rank finished a step in which the recorder could not see a gradient."""
    trace = evidence.trace
    entry = trace.entry(rank, Kind.LOCAL_GRADIENT, step, index)
    if entry.state is State.UNWRITTEN and trace.header(rank, step).written:
        tally.remark(
            "the code passed parameters themselves to a collective during backward, where torch "
            "forgets their hooks: some local gradients were not seen and are not compared; give "
            "the collective parameter.data"
        )
