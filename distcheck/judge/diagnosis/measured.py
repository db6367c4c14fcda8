"""A failed step and its parameters as tensors, independent of the kind of recording (`StepView`).
Expectations are computed on demand, because later questions depend on earlier answers; checks
compute them in advance.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch

from distcheck.judge.oracles import rounding_bound
from distcheck.judge.oracles.references import AtStep
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.judge.oracles.shards import NotRecordedError
from distcheck.machine.numerics import as_float64
from distcheck.recordings.recording import Kind
from distcheck.records import LossName, TensorSpec


class StepView(ABC):
    """A step of W ranks with data, numbered from 0; parameters by their index in `specs`.

    `measuring` and everything below it read a step only through a `StepView`, so a cause that is
    named for one kind of recording is named for every kind. Two ranks that hold gradients g_0 and
    g_1 after backward, and (g_0 + g_1) / 2 in `.grad` when the optimizer steps, are a view with

        weights  [1.0, 1.0]       each rank's shard has the same number of samples
        unscaled [1.0, 1.0]       no rank scaled its loss
        local    g_0, g_1         expected local gradients (in a job: the recorded ones)
        reduced  (g_0 + g_1) / 2  on both ranks
        interval mean and bound   of any summation order of g_0 / 2 and g_1 / 2

    The view of a verification (`StepExpectation`) recomputes `local` from the recorded parameters
    and samples; that of a job (`distcheck.job.step_view`) takes it from the recording.
    """

    step: int
    specs: tuple[TensorSpec, ...]

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks in the world."""

    @property
    @abstractmethod
    def weights(self) -> Sequence[float]:
        """W n_r / N for each rank: 1.0 for equal shards."""

    @property
    @abstractmethod
    def unscaled(self) -> Sequence[float]:
        """The loss scale of each rank, which its local gradients contain."""

    @abstractmethod
    def local(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the expected local gradient of a rank, or None for no gradient."""

    @abstractmethod
    def seen(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the recorded local gradient, or None if it was not recorded."""

    @abstractmethod
    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        """Return the gradient of a rank after synchronization."""

    @abstractmethod
    def digest(self, rank: int, index: int) -> bytes:
        """Return the digest of `reduced`."""

    @abstractmethod
    def interval(self, index: int, *, wire: str | None = None) -> Interval | None:
        """Return the mean of the local gradients and its error bound; None without any."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The dtype whose smallest number is the absolute part of a bound."""

    @property
    def wire(self) -> str | None:
        """The dtype of communication that the strategy declares, if different, or None."""
        return None

    @property
    def lost(self) -> str:
        """The reason that no gradient can come back from some rank's loss, or ""."""
        return ""

    @property
    def half_quanta(self) -> Sequence[float]:
        """Bounds of each rank's quantization error; empty if that is not accepted."""
        return ()

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The possible numbers of micro-batches of a shard; empty if there is only one."""
        return ()

    @property
    def token_counts(self) -> Mapping[str, Any]:
        """The fields of `StepFacts` for ranks weighted by tokens; empty otherwise."""
        return {}

    def loss_factor(self, rank: int) -> float:
        return self.unscaled[rank]

    def unmoved_ranks(self) -> tuple[int, ...]:
        """Return the ranks whose parameters the step should have changed, but did not."""
        return ()


T = TypeVar("T")


class StepExpectation(AtStep, StepView):
    """The expectation at a step, recomputed from the recording of a case's ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.trace.ranks

    @property
    def weights(self) -> Sequence[float]:
        return self.shares.weights

    @property
    def unscaled(self) -> Sequence[float]:
        return self.shares.unscaled

    @property
    def dtype(self) -> str:
        return self.case.dtype

    @property
    def wire(self) -> str | None:
        return self.contract.wire

    @property
    def lost(self) -> str:
        return self.shares.lost

    def loss_factor(self, rank: int) -> float:
        return 1.0 if self.contract.weighting == "loss" else self.unscaled[rank]

    def local(self, rank: int, index: int) -> torch.Tensor | None:
        return self.shards[rank].gradients[index]

    def seen(self, rank: int, index: int) -> torch.Tensor | None:
        return self.trace.tensor(rank, Kind.LOCAL_GRADIENT, self.step, index)

    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        return self.trace.tensor(rank, Kind.GRADIENT, self.step, index)

    def digest(self, rank: int, index: int) -> bytes:
        return self.trace.entry(rank, Kind.GRADIENT, self.step, index).digest

    def interval(
        self, index: int, *, wire: str | None = None, loss: LossName | None = None
    ) -> Interval | None:
        """Return the mean and bound, like `RoundingBound.interval`."""
        return rounding_bound.mean_of_step(self).interval(index, wire=wire, loss=loss)

    def unmoved_ranks(self) -> tuple[int, ...]:
        """Return ranks whose parameters stayed the same, although their update is not zero."""
        trace, step, found = self.trace, self.step, []
        indices = range(len(self.specs))
        for rank in range(len(self.weights)):
            before, after = (
                [trace.entry(rank, Kind.PARAMETER, slot, i).digest for i in indices]
                for slot in (step, step + 1)
            )
            held = [self.reduced(rank, i) for i in indices]
            if before != after or not any(h is not None and bool(h.any()) for h in held):
                continue
            try:
                moved = self.references.update.run(rank, step)[Kind.PARAMETER]
            except NotRecordedError:
                continue
            stayed = [trace.tensor(rank, Kind.PARAMETER, step, i) for i in indices]
            if any(
                a is not None and b is not None and not torch.equal(a, b)
                for a, b in zip(moved, stayed, strict=True)
            ):
                found.append(rank)
        return tuple(found)

    @property
    def half_quanta(self) -> Sequence[float]:
        halves = rounding_bound.mean_of_step(self).half_quanta
        return [max(float(half.max()) for half in of_rank) for of_rank in halves]

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Numbers of micro-batches per batch: of backward, of the loop, and their product."""
        own, by_loop = self.contract.micro_batches, self.training.accumulate
        return tuple(sorted({own, by_loop, own * by_loop} - {1}))

    @property
    def token_counts(self) -> dict[str, Any]:
        shares = self.shares
        summed = shares.loss == "tokens"
        counted = all(header.tokens is not None for header in shares.headers)
        if not summed and not counted:
            return {}
        positions = tuple(header.positions for header in shares.headers) if counted else ()
        return {
            "samples": shares.sizes,
            "tokens": shares.counts,
            "positions": positions,
            "summed": summed,
        }


@dataclass(frozen=True, eq=False)
class MeasuredParameter:
    """A parameter at one step. Its float64 tensors are computed on demand. Only those named in
    `keeps` are kept, since those of a large model would not fit. Complex numbers are pairs of real
    ones.

    `to` replaces the expectation. `recorded` stands for the mean of the recorded local gradients,
    so that only the effect of synchronization remains, whatever went wrong before. `equal` stands
    for the unweighted mean, so that only mistakes in addition to missing weights remain.
    """

    view: StepView
    index: int
    name: str
    elements: int
    keeps: Container[str]
    to: Literal["", "recorded", "equal"] = ""
    _kept: dict[tuple[str, int], Any] = field(default_factory=dict, init=False)

    @property
    def interval(self) -> Interval:
        """The mean, and the error bound of a correct result."""
        return self._keep("interval", 0, self._mean)

    @cached_property
    def wrong(self) -> tuple[int, ...]:
        """The ranks whose result exceeds the bound."""
        mean, bound = self.interval.mean, self.interval.bound
        ranks = range(self.world)
        return tuple(r for r in ranks if not bool(((self.result(r) - mean).abs() <= bound).all()))

    @property
    def world(self) -> int:
        return len(self.view.weights)

    @property
    def shares(self) -> list[float]:
        """The weight of each rank's local gradient in the mean."""
        weights = [1.0] * self.world if self.to == "equal" else self.view.weights
        pairs = zip(weights, self.view.unscaled, strict=True)
        return [weight / self.world / factor for weight, factor in pairs]

    def left(self, rank: int) -> torch.Tensor:
        return self._keep("left", rank, lambda: self._local_gradient(rank))

    def shard(self, rank: int) -> torch.Tensor:
        """Return the gradient of a rank's mean loss, without loss scaling."""
        return self._keep("shard", rank, lambda: self.left(rank) / self.view.unscaled[rank])

    def result(self, rank: int) -> torch.Tensor:
        return self._keep("result", rank, lambda: as_float64(self._held(rank)))

    def _keep(self, name: str, rank: int, make: Callable[[], T]) -> T:
        if name not in self.keeps:
            return make()
        if (name, rank) not in self._kept:
            self._kept[name, rank] = make()
        found: T = self._kept[name, rank]
        return found

    def _mean(self) -> Interval:
        if self.to:
            parts = [self._left_on(rank) for rank in range(self.world)]
            return interval(parts, self.shares, rescaled=True)
        found = self.view.interval(self.index)
        assert found is not None
        return found

    def _local_gradient(self, rank: int) -> torch.Tensor:
        return as_float64(self._left_on(rank))

    def _left_on(self, rank: int) -> torch.Tensor:
        gradient = (self.view.seen if self.to == "recorded" else self.view.local)(rank, self.index)
        if gradient is not None:
            return gradient
        dtype = getattr(torch, self.view.specs[self.index].dtype)
        return torch.zeros_like(self._held(rank), dtype=dtype)

    def _held(self, rank: int) -> torch.Tensor:
        found = self.view.reduced(rank, self.index)
        assert found is not None
        return found
