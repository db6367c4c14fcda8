"""What is expected of ranks that train by themselves and average parameters: `--accept
local-sgd:PERIOD`.

Between two averages each rank is one machine with its own shard: its gradients are its shard's, to
the bit, and its parameters and optimizer state what the optimizer makes of them, to the bit. After
an averaging step every rank holds the plain mean of what all ranks' own updates left,

    p  =  1 / W  sum_r p_r,      |actual - p|  <=  gamma(W + 1) / W sum_r |p_r|  +  (W + 1) tiny

by the same argument as for gradients (`rounding`): W - 1 additions and two roundings for the scale.
The p_r are computed from what each rank recorded before and during the step, so an average that is
missed, late, or of too few ranks shows at the step where it happens. The optimizer's state stays
each rank's own.

Averages are PERIOD steps apart; the first is at one of the first PERIOD steps, wherever the ranks'
parameters are found to agree first (some count from 0, some from 1). If they agree at none of
those, the last of them is judged as the first average. After a step that moved no parameter, as one
at a rate of 0, ranks agree without an average; of that phase the first step that moved one tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader


@dataclass(frozen=True)
class ParameterAverages:
    """The steps after which the ranks of a trace must hold the mean of their parameters. `seen`:
    whether they agreed after one of the first `period` steps; `first` is that, or the last of them.
    """

    period: int
    first: int
    seen: bool

    @classmethod
    def seen_in(cls, trace: TraceReader, period: int) -> "ParameterAverages":
        written = trace.steps_written()
        telling = sorted(
            next((step for step in range(phase, written, period) if _moved(trace, step)), phase)
            for phase in range(min(period, written))
        )
        agreed = next((step for step in telling if agree(trace, step + 1)), None)
        first = period - 1 if agreed is None else agreed % period
        return cls(period=period, first=first, seen=agreed is not None)

    def at(self, step: int) -> bool:
        return (step - self.first) % self.period == 0


def mean_of(parameters: Sequence[torch.Tensor]) -> Interval:
    """The plain mean of one parameter over the ranks, and how far rounding may take it."""
    return interval(parameters, [1.0 / len(parameters)] * len(parameters))


def _moved(trace: TraceReader, step: int) -> bool:
    return any(
        trace.entry(rank, Kind.PARAMETER, step, index).digest
        != trace.entry(rank, Kind.PARAMETER, step + 1, index).digest
        for rank in range(trace.layout.world)
        for index in range(len(trace.layout.model.parameters))
    )


def agree(trace: TraceReader, slot: int) -> bool:
    """Whether all ranks hold the same parameters, to the bit."""
    for index in range(len(trace.layout.model.parameters)):
        entries = [
            trace.entry(rank, Kind.PARAMETER, slot, index) for rank in range(trace.layout.world)
        ]
        if any(e.state is not EntryState.STORED or e.digest != entries[0].digest for e in entries):
            return False
    return True
