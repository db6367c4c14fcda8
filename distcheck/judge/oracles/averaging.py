"""Expectations for ranks that step locally and average parameters: `--accept local-sgd:PERIOD`.

Between two averages each rank is a single process with a separate shard: its gradients are those of
its shard, bitwise, and parameters and optimizer state follow from them, bitwise. After an averaging
step every rank holds the plain mean of all ranks' updated parameters,

    p  =  1 / W  sum_r p_r,      |actual - p|  <=  gamma(W + 1) / W sum_r |p_r|  +  (W + 1) tiny

by the same argument as for gradients (`rounding`): W - 1 additions and two roundings for the scale.
The p_r are computed from each rank's recording before and during the step, so an average that is
missing, late, or over too few ranks appears at the step where it happens. Optimizer state remains
local.

Two averages are separated by PERIOD steps (some code counts from 0, some from 1). The first average
is at one of the first PERIOD steps: the first step after which the ranks' parameters agree. If they
agree after none of these, the last of these steps is judged as the first average. After a step that
changed no parameter, such as one at a learning rate of 0, ranks agree without an average; the first
step of that phase that changed a parameter decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader


@dataclass(frozen=True)
class ParameterAverages:
    """The steps after which the ranks must hold the mean of their parameters.

    `seen` is True if ranks agreed after one of the first `period` steps. `first` is that step, or
    else the last of the `period` steps.
    """

    period: int
    first: int
    seen: bool

    @classmethod
    def find_in(cls, trace: TraceReader, period: int) -> "ParameterAverages":
        written = trace.steps_written()
        telling = sorted(
            next((step for step in range(phase, written, period) if _changed(trace, step)), phase)
            for phase in range(min(period, written))
        )
        agreed = next((step for step in telling if ranks_agree_bitwise(trace, step + 1)), None)
        first = period - 1 if agreed is None else agreed % period
        return cls(period=period, first=first, seen=agreed is not None)

    def at(self, step: int) -> bool:
        return (step - self.first) % self.period == 0


def mean_over_ranks(parameters: Sequence[torch.Tensor]) -> Interval:
    """Return the plain mean of one parameter over the ranks, and its rounding bound."""
    return interval(parameters, [1.0 / len(parameters)] * len(parameters))


def _changed(trace: TraceReader, step: int) -> bool:
    return any(
        trace.entry(rank, Kind.PARAMETER, step, index).digest
        != trace.entry(rank, Kind.PARAMETER, step + 1, index).digest
        for rank in range(trace.layout.world)
        for index in range(len(trace.layout.model.parameters))
    )


def ranks_agree_bitwise(trace: TraceReader, slot: int) -> bool:
    """Return True if all ranks hold the same parameters, bitwise."""
    for index in range(len(trace.layout.model.parameters)):
        entries = [
            trace.entry(rank, Kind.PARAMETER, slot, index) for rank in range(trace.layout.world)
        ]
        if any(e.state is not EntryState.STORED or e.digest != entries[0].digest for e in entries):
            return False
    return True
