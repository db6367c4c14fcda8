"""What each backward pass counts for in a wrong gradient, where a step has several. Runs in a
judge.
"""

import torch

from distcheck.judge.diagnosis.facts import PassFacts
from distcheck.judge.diagnosis.on_demand import StepExpectation
from distcheck.judge.fitting import fit
from distcheck.machine.numerics import wide
from distcheck.recordings.recording import Kind

_MOST_ELEMENTS = 1 << 18  # of a model: of more, every k-th is taken
# Chosen, of the largest: below it, passes cannot be distinguished.
_LEAST_SINGULAR = 1e-5
_RESIDUAL = 1e-5  # Chosen, of a result: passes were added up in its dtype


def measured_passes(expectation: StepExpectation) -> PassFacts | None:
    """Least squares of every rank's gradients on the passes of all ranks; None where a step has one
    pass, or they cannot be distinguished, or the gradients are no combination of them.
    """
    trace, step = expectation.trace, expectation.step
    ranks = range(trace.layout.world)
    parts = [expectation.passes(rank) for rank in ranks]
    count = min(len(passes) for passes in parts)
    if count < 2 or count != max(len(passes) for passes in parts):
        return None
    elements = sum(spec.elements for spec in trace.layout.model.parameters)
    stride = max(1, elements // _MOST_ELEMENTS)
    columns = [
        _flat([gradients[index] for index in _used(expectation)], stride)
        for passes in parts
        for gradients in passes
    ]
    weights = []
    for rank in ranks:
        held = [trace.tensor(rank, Kind.GRADIENT, step, index) for index in _used(expectation)]
        found = fit([(_flat(held, stride), *columns)])
        if found is None or found.apart < _LEAST_SINGULAR or not found.share <= _RESIDUAL:
            return None
        starts = range(0, len(columns), count)
        weights.append(tuple(found.factors[start : start + count] for start in starts))
    return PassFacts(step=step, passes=count, weights=tuple(weights))


def _used(expectation: StepExpectation) -> list[int]:
    """Parameters that every shard has a gradient of."""
    count = len(expectation.trace.layout.model.parameters)
    shards = expectation.shards
    return [i for i in range(count) if all(s.gradients[i] is not None for s in shards)]


def _flat(tensors: list[torch.Tensor | None], stride: int) -> torch.Tensor:
    found = [wide(t).reshape(-1)[::stride] for t in tensors if t is not None]
    return torch.cat(found)
