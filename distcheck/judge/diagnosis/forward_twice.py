"""Whether wrong buffers are those of a forward pass that ran twice, as a recomputed one does."""

import torch

from distcheck.judge.diagnosis.on_demand import StepExpectation
from distcheck.judge.fitting import fit
from distcheck.recordings.recording import Kind

# Chosen: far above the rounding of a moving average in float32, far below what it moves by.
_SAME = 1e-4


def ran_twice(expectation: StepExpectation) -> bool:
    """Whether every buffer that a step left wrong went on from the right value as it had come to
    it. One pass takes a moving average from b to b + m (x - b), a second one on the same batch by
    (1 - m) of that distance further; a counter by all of it.
    """
    trace, step = expectation.trace, expectation.step
    wrong = 0
    for rank, shard in enumerate(expectation.shards):
        for index, expected in enumerate(shard.buffers):
            before = trace.tensor(rank, Kind.BUFFER, step, index)
            actual = trace.tensor(rank, Kind.BUFFER, step + 1, index)
            if before is None or actual is None:
                return False
            if torch.equal(actual, expected):
                continue
            wrong += 1
            if not _goes_on(before.double(), expected.double(), actual.double()):
                return False
    return wrong > 0


def _goes_on(before: torch.Tensor, once: torch.Tensor, twice: torch.Tensor) -> bool:
    found = fit([(twice - once, once - before)])
    if found is None:
        return False
    (share,), rest = found.factors, found.left / float((once - before).norm())
    return 0 < share <= 1 + _SAME and rest <= _SAME
