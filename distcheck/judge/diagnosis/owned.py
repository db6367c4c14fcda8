"""Finds gradients that the promise has on their owners, and that are on other ranks."""

import torch

from distcheck.judge.diagnosis.facts import Elsewhere
from distcheck.judge.diagnosis.on_demand import StepExpectation
from distcheck.machine.numerics import wide
from distcheck.recordings.recording import Kind


def owned_elsewhere(expectation: StepExpectation) -> tuple[Elsewhere, ...]:
    """The parameters whose owner has another gradient than the mean, or none, where another rank
    has the mean. A mean of zero is on no rank more than on another.
    """
    trace, step, found = expectation.trace, expectation.step, list[Elsewhere]()
    if trace.ranks != tuple(range(trace.layout.world)):
        return ()  # owners are counted among all ranks, and some are without data
    for index, spec in enumerate(trace.layout.model.parameters):
        owner = trace.owner(0, Kind.GRADIENT, step, index)
        mean = expectation.interval(index)
        if owner is None or mean is None or not bool(mean.mean.any()):
            continue

        def is_right(rank: int) -> bool:
            held = trace.own_tensor(rank, Kind.GRADIENT, step, index)  # noqa: B023
            return held is not None and _within(held, mean.mean, mean.bound)  # noqa: B023

        others = [rank for rank in range(trace.layout.world) if rank != owner]
        holder = None if is_right(owner) else next(filter(is_right, others), None)
        if holder is not None:
            found.append(Elsewhere(step=step, name=spec.name, owner=owner, holder=holder))
    return tuple(found)


def _within(held: torch.Tensor, mean: torch.Tensor, bound: torch.Tensor) -> bool:
    return bool(((wide(held) - mean).abs() <= bound).all())
