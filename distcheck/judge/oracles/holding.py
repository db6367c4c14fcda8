"""Which ranks must hold the mean gradient, by what they recorded."""

from collections.abc import Sequence

from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.reader import TraceReader


def ranks_that_hold(trace: TraceReader, with_data: Sequence[int]) -> tuple[int, ...]:
    """Those with data, and of those without the ones whose gradients of zero were ever made
    something else. A server that keeps the mean must hold the right one, one that only hands it on
    has nothing to compare.
    """
    without = [rank for rank in range(trace.layout.world) if rank not in with_data]
    return tuple(sorted([*with_data, *(rank for rank in without if _ever_held(trace, rank))]))


def _ever_held(trace: TraceReader, rank: int) -> bool:
    count = len(trace.layout.model.parameters)
    return any(
        tensor is not None and bool(tensor.any())
        for step in range(trace.steps_written())
        for tensor in (trace.tensor(rank, Kind.GRADIENT, step, index) for index in range(count))
    )
