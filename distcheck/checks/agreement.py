"""All ranks hold the same gradients, parameters and optimizer state, to the bit.

Agreement alone proves little (all may agree on the wrong answer), but replicas that disagree by
one bit drift apart, whatever any bound says.
"""

from functools import partial

from distcheck.checks.comparison import bitwise
from distcheck.checks.evidence import Evidence
from distcheck.checks.matching import match_ranks
from distcheck.checks.tally import Tally
from distcheck.traces.layout import Kind, State

NAME = "agreement"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Every rank against rank 0, by digest; values are looked at where digests differ."""
    layout, trace = evidence.trace.layout, evidence.trace
    for expectation in evidence.expectations:
        for kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.OPTIMIZER):
            slot = expectation.step + (kind is not Kind.GRADIENT)
            for index in range(len(layout.specs(kind))):
                state = trace.entry(0, kind, slot, index).state
                if state not in (State.STORED, State.ABSENT):
                    continue  # nothing to agree with: counted as not compared
                first = trace.tensor(0, kind, slot, index)
                match_ranks(
                    tally,
                    trace,
                    kind=kind,
                    slot=slot,
                    step=expectation.step,
                    index=index,
                    ranks=evidence.ranks,
                    compare=None if first is None else partial(bitwise, expected=first),
                )
