"""One step's gradients as a diagnosis reads them, whichever recording they come from.

`measuring` and all below it read a step through a `StepView` alone, so a cause that is named in one
kind of recording is named in every kind. Two ranks that hold gradients g_0 and g_1 after backward,
and (g_0 + g_1) / 2 in `.grad` when the optimizer steps, are a view with

    weights  [1.0, 1.0]       each rank's shard has as many samples
    unscaled [1.0, 1.0]       no rank scaled its loss
    local    g_0, g_1         what backward should have left (here: what it was seen to leave)
    reduced  (g_0 + g_1) / 2  on both ranks
    interval mean and bound   of any summation order of g_0 / 2 and g_1 / 2

A verification's view (`measured.StepExpectation`) computes `local` again, from the parameters and
samples that ranks recorded; a job's view (`distcheck.job.step_view`) takes it from the recording.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.records import TensorSpec


class StepView(ABC):
    """A step of W ranks with data, numbered from 0; parameters go by their index in `specs`."""

    step: int
    specs: tuple[TensorSpec, ...]

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks' numbers in the world that was run."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[float]:
        """W n_r / N by rank: 1.0 for equal shards."""

    @property
    @abstractmethod
    def unscaled(self) -> Sequence[float]:
        """What each rank's loss was multiplied by, which its local gradients have as a factor."""

    @abstractmethod
    def local(self, rank: int, index: int) -> torch.Tensor | None:
        """What backward should have left on a rank; None for no gradient."""

    @abstractmethod
    def seen(self, rank: int, index: int) -> torch.Tensor | None:
        """What backward was recorded to leave; None if it was not recorded."""

    @abstractmethod
    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        """What the rank held after gradient synchronization."""

    @abstractmethod
    def digest(self, rank: int, index: int) -> bytes:
        """The digest of `reduced`."""

    @abstractmethod
    def interval(self, index: int, *, wire: str | None = None) -> Interval | None:
        """The mean of the ranks' local gradients, and the largest error of a correct result; None
        if no rank has a gradient.
        """

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype whose smallest number is the absolute part of a bound."""

    @property
    def wire(self) -> str | None:
        """The dtype that a strategy declares to exchange in, if another one."""
        return None

    @property
    def lost(self) -> str:
        """Why no gradient can come back from some rank's loss; empty if it can."""
        return ""

    @property
    def half_quanta(self) -> Sequence[float]:
        """How far quantizing may move each rank's elements; empty if it is not accepted."""
        return ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that a shard may be said to have; none if it has one."""
        return ()

    @property
    def token_counts(self) -> Mapping[str, Any]:
        """The fields of `StepFacts` for ranks that are weighted by tokens; empty for others."""
        return {}

    def loss_factor(self, rank: int) -> float:
        return self.unscaled[rank]

    def unmoved(self) -> tuple[int, ...]:
        """The ranks whose parameters the step left as they were, and should have moved."""
        return ()
