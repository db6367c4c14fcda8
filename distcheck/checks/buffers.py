"""Running statistics and other buffers moved as one machine's would, shard by shard.

Where a forward pass starts from is part of the contract: each rank's own buffers, or rank 0's.
"""

from functools import partial

from distcheck.checks.comparison import bitwise
from distcheck.checks.evidence import Evidence
from distcheck.checks.matching import match_ranks
from distcheck.checks.tally import Tally
from distcheck.traces.layout import Kind

NAME = "buffers"
SCOPE = "step"


def compare(evidence: Evidence, tally: Tally) -> None:
    """Bitwise, per rank, against the shard's forward pass computed again."""
    for expectation in evidence.expectations:
        for rank in evidence.ranks:
            for index, expected in enumerate(expectation.shards[rank].buffers):
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
