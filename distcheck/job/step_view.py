"""One step of a job as a `StepView`, which is the input of checks and causes.

The recorded local gradients stand for those of the shards: a mistake in them shows in the
comparison with the reference, not here. Optimizer gradients (`Kind.GRADIENT`) must be the mean
times the factor of clipping by norm. Reduced gradients (`Kind.EXCHANGED`) must be the mean itself,
up to a scale that the script removes later.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from distcheck.judge.diagnosis.measured import StepView
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.machine.numerics import gamma, real_parts, unit_roundoff
from distcheck.recordings.jobs import sketches
from distcheck.recordings.jobs.reading import STEMS, JobRecording
from distcheck.recordings.recording import Kind
from distcheck.records import TensorSpec


def local_gradients(job: JobRecording, step: int, name: str) -> list[torch.Tensor] | None:
    """Return the local gradients of all ranks; None if a rank has a reduced gradient but no local
    one.
    """
    found = [job.gradient(Kind.LOCAL_GRADIENT, rank, step, name) for rank in range(job.world)]
    raw = [job.gradient(Kind.EXCHANGED, rank, step, name) for rank in range(job.world)]
    if all(one is None for one in found):
        return None
    like = next(one for one in found if one is not None)
    if any(one is None and other is None for one, other in zip(found, raw, strict=True)):
        return None
    return [torch.zeros_like(like) if one is None else one for one in found]


class JobStep(StepView):
    """A step of a job; if some rank kept only 64 projections of each gradient, all ranks use
    projections, which are weighted like gradients.

        kind     the measured stage: EXCHANGED or GRADIENT
        names    the parameters to examine; those with a recorded gradient have an index
        shares   [W] weight of each rank's local gradient in the mean; they sum to 1
        factor   factor between the mean and a correct result
        clips    the factor of clipping and its number of roundings, by clipped parameter
        targets  [W] number of targets of each rank's mean loss, if ranks are weighted by these
    """

    def __init__(
        self,
        job: JobRecording,
        step: int,
        kind: Kind,
        names: Sequence[str],
        shares: Sequence[float],
        *,
        factor: float = 1.0,
        clips: Mapping[str, tuple[float, int]],
        targets: Sequence[int] = (),
    ) -> None:
        self.job, self.step, self.kind = job, step, kind
        self.factor = factor
        self._shares, self._clips, self._targets = shares, clips, targets
        self._whole = [record.whole for record in job.at(step)]
        found = {name: local_gradients(job, step, name) for name in names}
        self._locals = {
            name: self._sketch_all(own) for name, own in found.items() if own is not None
        }
        dtypes = job.at(step)[0].dtypes
        self.specs = tuple(
            TensorSpec(name=n, shape=tuple(own[0].shape), dtype=dtypes.get(n, "float32"))
            for n, own in self._locals.items()
        )

    def _sketch_all(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._maybe_sketch(one, rank) for rank, one in enumerate(tensors)]

    def _maybe_sketch(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        as_it_is = all(self._whole) or not self._whole[rank]
        return tensor if as_it_is else sketches.project(tensor)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(map(self.job.called, range(self.job.world)))

    @property
    def weights(self) -> Sequence[float]:
        return [share * self.job.world for share in self._shares]

    @property
    def unscaled(self) -> Sequence[float]:
        return [1.0] * self.job.world

    @property
    def dtype(self) -> str:
        return self.specs[0].dtype if self.specs else "float32"

    @property
    def wire(self) -> str | None:
        """Dtype of the gradients if they are recorded as projections, which are float64 sums of
        their elements; None for complete tensors.
        """
        return None if all(self._whole) else self.dtype

    @cached_property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple({self.passes} - {1})

    @property
    def passes(self) -> int:
        """The largest number of backward passes of a rank."""
        return max(1, max(len(record.trained) for record in self.job.at(self.step)))

    @property
    def token_counts(self) -> Mapping[str, Any]:
        if len(set(self._targets)) < 2:
            return {}
        rows = [sum(len(one.rows) for one in record.trained) for record in self.job.at(self.step)]
        return {"samples": tuple(rows), "tokens": tuple(self._targets)}

    def local(self, rank: int, index: int) -> torch.Tensor:
        own, (times, _) = self._locals[self.specs[index].name][rank], self._factor_of(index)
        return own if times == 1.0 else own * times

    def _factor_of(self, index: int) -> tuple[float, int]:
        clipped, roundings = self._clips.get(self.specs[index].name, (1.0, 0))
        return self.factor * clipped, roundings

    seen = local

    def reduced(self, rank: int, index: int) -> torch.Tensor | None:
        found = self.job.gradient(self.kind, rank, self.step, self.specs[index].name)
        return None if found is None else self._maybe_sketch(found, rank)

    def digest(self, rank: int, index: int) -> bytes:
        digests = self.job.records[rank, self.step].digests
        return bytes.fromhex(digests.get(f"{STEMS[self.kind]}/{self.specs[index].name}", ""))

    def interval(self, index: int, *, wire: str | None = None) -> Interval:
        """Return the mean and its bound. Raises NotBoundedError."""
        spec, ranks = self.specs[index], range(self.job.world)
        own, (times, roundings) = self._locals[spec.name], self._factor_of(index)
        if not all(self._whole):
            wire = wire or spec.dtype
            sizes = [_sums_of_sizes(self.job, rank, self.step, spec.name) for rank in ranks]
        else:
            sizes = [_magnitudes(self.job, r, self.step, spec.name, own[r]) for r in ranks]
        found = interval(
            own, self._shares, rescaled=True, passes=self.passes, magnitudes=sizes,
            wire=None if wire is None else getattr(torch, wire),
        )  # fmt: skip
        mean, bound = found.mean * times, found.bound * abs(times)
        if roundings:  # Derived: clipping rounds its factor, and the product with each element
            bound = bound + gamma(roundings, unit_roundoff(own[0].dtype)) * mean.abs()
        return Interval(mean, bound)


def _magnitudes(
    job: JobRecording, rank: int, step: int, name: str, local: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the magnitudes of the passes' gradients, which may cancel in their sum. If
    each pass is synchronized, each one is rounded.
    """
    kept = job.tensors(rank, step).get(f"sizes/{name}")
    if kept is None:
        return real_parts(local).abs()
    # They were added in the gradient's dtype, with fewer roundings than passes.
    passes = len(job.records[rank, step].passes)
    return kept.double() * (1 + gamma(passes, unit_roundoff(kept.dtype)))


def _sums_of_sizes(job: JobRecording, rank: int, step: int, name: str) -> torch.Tensor:
    """Return the sums of `_magnitudes` as 64 projections, for a step that was recorded as
    projections.
    """
    kept = job.tensors(rank, step).get(f"magnitude/local/{name}")
    if kept is not None:
        return kept
    local = job.gradient(Kind.LOCAL_GRADIENT, rank, step, name)
    if local is None:
        return torch.zeros(sketches.SLOTS)
    return sketches.project_magnitudes(_magnitudes(job, rank, step, name, local))
