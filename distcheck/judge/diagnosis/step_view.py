"""Interface to one step's gradients for diagnosis, independent of the kind of recording.

`measuring` and everything below it read a step only through a `StepView`, so a cause that is named
for one kind of recording is named for every kind. Two ranks that hold gradients g_0 and g_1 after
backward, and (g_0 + g_1) / 2 in `.grad` when the optimizer steps, are a view with

    weights  [1.0, 1.0]       each rank's shard has the same number of samples
    unscaled [1.0, 1.0]       no rank scaled its loss
    local    g_0, g_1         expected local gradients (in a job: the recorded ones)
    reduced  (g_0 + g_1) / 2  on both ranks
    interval mean and bound   of any summation order of g_0 / 2 and g_1 / 2

A verification's view (`measured.StepExpectation`) recomputes `local` from the recorded parameters
and samples; a job's view (`distcheck.job.step_view`) takes it from the recording.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distcheck.judge.oracles.rounding import Interval
from distcheck.records import TensorSpec


class StepView(ABC):
    """A step of W ranks with data, numbered from 0; parameters by their index in `specs`."""

    step: int
    specs: tuple[TensorSpec, ...]

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks' numbers in the world."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[float]:
        """W n_r / N by rank: 1.0 for equal shards."""

    @property
    @abstractmethod
    def unscaled(self) -> Sequence[float]:
        """The loss scale of each rank, contained in its local gradients."""

    @abstractmethod
    def local(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the expected local gradient of a rank, or None for no gradient."""

    @abstractmethod
    def seen(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the recorded local gradient, or None if it was not recorded."""

    @abstractmethod
    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the rank's gradient after synchronization."""

    @abstractmethod
    def digest(self, rank: int, index: int) -> bytes:
        """Return the digest of `reduced`."""

    @abstractmethod
    def interval(self, index: int, *, wire: str | None = None) -> Interval | None:
        """Return the mean of the local gradients and the largest error of a correct result; None if
        no rank has a gradient.
        """

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype whose smallest number is the absolute part of a bound."""

    @property
    def wire(self) -> str | None:
        """The dtype of communication that a strategy declares, if it differs."""
        return None

    @property
    def lost(self) -> str:
        """The reason why no gradient can come back from some rank's loss, or ""."""
        return ""

    @property
    def half_quanta(self) -> Sequence[float]:
        """Bound of the quantization error of each rank's elements; empty if it is not accepted."""
        return ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The possible numbers of micro-batches of a shard; empty for one."""
        return ()

    @property
    def token_counts(self) -> Mapping[str, Any]:
        """The fields of `StepFacts` for ranks weighted by tokens; empty otherwise."""
        return {}

    def loss_factor(self, rank: int) -> float:
        return self.unscaled[rank]

    def unmoved(self) -> tuple[int, ...]:
        """Return the ranks whose parameters the step should have changed but did not."""
        return ()
