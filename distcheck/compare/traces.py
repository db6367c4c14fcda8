"""Compares two traces of one case, in execution order.

Only the first step that differs has bounds (`StepBounds`). Later steps start from different states.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from distcheck.compare.records import COMPARE, CompareRequest
from distcheck.contract import Contract
from distcheck.judge.checks.comparison import Comparison, compare_by_norm, compare_within
from distcheck.judge.checks.merging import share_of_bound
from distcheck.judge.divergence.lockstep import LockstepComparison
from distcheck.judge.oracles import rounding
from distcheck.judge.oracles.full_batch import loss_tolerance, module_scales, relative_tolerance
from distcheck.judge.oracles.shares import Shares
from distcheck.machine import numerics, seeds
from distcheck.recordings.differing import Pair, TraceComparison
from distcheck.recordings.recording import EntryState, Kind
from distcheck.recordings.traces.reader import TraceReader
from distcheck.records import Difference
from distcheck.records.layers import IN_FLOAT32, IN_FLOAT64
from distcheck.worlds.jobs import Descriptors, Reporter

_LAYERS = {"float32": IN_FLOAT32, "float64": IN_FLOAT64}


class StepBounds:
    """Bounds for the difference of two correct results at the first step that differs."""

    def __init__(self, job: CompareRequest, then: TraceReader, step: int) -> None:
        self._case, self._contracts, self._step = job.case, job.contracts, step
        self._training = job.training
        self._trace = then = then.of_ranks(job.case.with_data)
        self._world = then.layout.world
        self._headers = tuple(then.header(rank, step) for rank in range(self._world))
        self._sizes = [len(header.ids) for header in self._headers]
        mesh = job.contracts[0].mesh(self._world)  # its ranks may share samples
        self._samples = sum(self._sizes if mesh is None else (self._sizes[r] for r in mesh.readers))
        self._layer = _LAYERS.get(job.case.dtype, "")
        self._names = [spec.name for spec in then.layout.model.parameters]

    def loss(self, rank: int) -> float | None:
        if not self._layer or rank not in self._case.with_data:
            return None
        header = self._headers[self._case.with_data.index(rank)]
        return 2 * loss_tolerance(self._layer, header.loss)

    def has_local(self, rank: int) -> bool:
        """Return True if `local` has a bound. Needs no tensors."""
        return bool(self._layer) and rank in self._case.with_data

    def has_synced(self, index: int, *, same_inputs: bool) -> bool:
        """Return True if `synced` may have a bound. Needs no tensors; only `synced` can find that
        the values of the tensors do not permit one.
        """
        entries = [
            self._trace.entry(rank, Kind.LOCAL_GRADIENT, self._step, index)
            for rank in range(self._world)
        ]
        if not any(entry.state is EntryState.STORED for entry in entries):
            return bool(self._layer)
        return self._bounds_exchange() and (same_inputs or bool(self._layer))

    def local(self, rank: int, index: int) -> float | None:
        """Return the bound for a rank's local gradient, as an L2 norm."""
        if not self.has_local(rank):
            return None
        position = self._case.with_data.index(rank)
        recorded = self._trace.tensors(position, Kind.LOCAL_GRADIENT, self._step)
        return 2 * self._scale(recorded, index, self._sizes[position])

    def synced(self, index: int, *, same_inputs: bool) -> torch.Tensor | float | None:
        """Return the bound for the reduced gradient: elementwise if inputs were bitwise equal,
        otherwise as an L2 norm; None if no bound is known.
        """
        shards = [
            self._trace.tensor(rank, Kind.LOCAL_GRADIENT, self._step, index)
            for rank in range(self._world)
        ]
        present = [shard for shard in shards if shard is not None]
        if not present:
            return self._bound_without_communication(index)
        if not self._bounds_exchange():
            return None
        filled = [torch.zeros_like(present[0]) if s is None else s for s in shards]
        try:
            bound = sum(
                (self._rounding(filled, contract) for contract in self._contracts),
                torch.zeros_like(present[0], dtype=torch.float64),
            )
        except numerics.NotBoundedError:
            return None
        if same_inputs:
            return bound
        inputs = [self.local(rank, index) for rank in self._case.with_data]
        if not self._layer:
            return None
        shares = self._shares(self._contracts[0])
        of_means = sum(abs(s) * d for s, d in zip(shares, inputs, strict=True) if d is not None)
        return of_means + float(bound.norm())

    def _bounds_exchange(self) -> bool:
        return self._training.loss_scale is None and self._training.accumulate <= 1

    def _bound_without_communication(self, index: int) -> float | None:
        """Return the bound for a gradient whose communication is not recorded: the full batch's."""
        if not self._layer:
            return None
        recorded = self._trace.tensors(0, Kind.GRADIENT, self._step)
        return 2 * self._scale(recorded, index, self._samples)

    def _scale(self, gradients: Sequence[torch.Tensor | None], index: int, samples: int) -> float:
        scales = module_scales(self._names, gradients)
        scale = scales.get(self._names[index].rpartition(".")[0], 0.0)
        return relative_tolerance(self._layer, samples) * scale

    def _rounding(self, shards: Sequence[torch.Tensor], contract: Contract) -> torch.Tensor:
        wire = None if contract.wire is None else getattr(torch, contract.wire)
        rescaled = any(factor != 1.0 for factor in self._shares_under(contract).loss_factors)
        return rounding.interval(shards, self._shares(contract), rescaled=rescaled, wire=wire).bound

    def _shares_under(self, contract: Contract) -> Shares:
        unscaled = (1.0,) * self._world
        loss = contract.loss_given(self._case.loss)
        return Shares(self._step, self._case.with_data, self._headers, contract, loss, unscaled)

    def _shares(self, contract: Contract) -> list[float]:
        """Return each rank's weight in the mean over all samples."""
        if contract.weighting == "loss":
            return [1.0 / self._world] * self._world
        step = self._shares_under(contract)
        total = max(1, sum(step.counts))
        pairs = zip(step.counts, step.loss_factors, strict=True)
        return [count / total / factor if factor else math.nan for count, factor in pairs]


class LockstepTraces(LockstepComparison):
    """Compares both traces step by step. The first step that differs is compared with bounds."""

    def __init__(self, job: CompareRequest, then: TraceReader, now: TraceReader) -> None:
        super().__init__(then, now, tensors=job.tensors, drifts_on=job.case.with_data[0])
        self._job, self._earlier = job, then

    def _judge_step(self, step: int, changed: Sequence[Pair], *, is_first: bool) -> None:
        has_bound = self._kind in ("loss", "outputs", "local gradients", "gradients")
        if is_first and has_bound:
            self._hold_against(StepBounds(self._job, self._earlier, step), step)

    def _hold_against(self, bounds: StepBounds, step: int) -> None:
        for rank in range(self._then.world):
            before, after = (t.header(rank, step).loss for t in (self._then, self._now))
            limit = bounds.loss(rank)
            if limit is not None and before != after:
                self._judged += 1
                self._keep_worst(_far_loss(rank, step, after, before, limit))
        changed_inputs = set()
        for pair in self._changed_pairs(Kind.LOCAL_GRADIENT, step):
            changed_inputs.add(pair.index)
            if not self._tensors:
                if bounds.has_local(pair.rank):
                    self._leave_unjudged(pair)
            elif (limit := bounds.local(pair.rank, pair.index)) is not None:
                self._judge(pair, limit)
        for pair in self._changed_pairs(Kind.GRADIENT, step):
            same_inputs = pair.index not in changed_inputs
            if not self._tensors:
                if bounds.has_synced(pair.index, same_inputs=same_inputs):
                    self._leave_unjudged(pair)
                continue
            bound = bounds.synced(pair.index, same_inputs=same_inputs)
            if bound is not None:
                self._judge(pair, bound)

    def _changed_pairs(self, kind: Kind, step: int) -> Iterator[Pair]:
        for rank in range(self._then.world):
            for index in range(len(self._then.names(kind))):
                pair = self._pair(kind, step, rank, index)
                if not pair.is_same:
                    yield pair

    def _judge(self, pair: Pair, bound: torch.Tensor | float) -> None:
        def compare(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
            if isinstance(bound, torch.Tensor):
                return compare_within(actual, expected.double(), bound)
            return compare_by_norm(actual, expected, bound)

        self._keep_worst(self._place(pair, compare))

    def _leave_unjudged(self, pair: Pair) -> None:
        """Count a difference that has a bound, but is known only by digest; a tensor that only one
        run has is beyond its bound.
        """
        if all(entry.state is EntryState.STORED for entry in (pair.one, pair.two)):
            self._not_judged += 1
        else:
            self._keep_worst(self._place(pair))

    def _keep_worst(self, place: Difference | None) -> None:
        if place is None:
            return
        if self._beyond is None or share_of_bound(place) > share_of_bound(self._beyond):
            self._beyond = place


def _far_loss(
    rank: int, step: int, actual: float, expected: float, limit: float
) -> Difference | None:
    error = abs(actual - expected)
    if error <= limit:
        return None
    return Difference(
        parameter="loss", rank=rank, step=step, index=(), actual=actual, expected=expected,
        error=error, bound=limit,
    )  # fmt: skip


@COMPARE.does
def compare_job(job: CompareRequest, fds: Descriptors, reporter: Reporter) -> TraceComparison:
    seeds.pin_determinism()
    then, now = (
        TraceReader(fds[name], layout, tensors=job.tensors)
        for name, layout in zip(COMPARE.descriptors, job.layouts, strict=True)
    )
    return compare_traces(job, then, now, reporter)


def compare_traces(
    job: CompareRequest, then: TraceReader, now: TraceReader, reporter: Reporter | None = None
) -> TraceComparison:
    """Compare all entries of both traces by digest. If digests differ and the job has tensors, also
    compare the values.
    """
    if then.layout.model != now.layout.model:
        return TraceComparison(
            why_not="the model has different parameters, buffers or optimizer state"
        )
    steps = min(then.steps_written(), now.steps_written())
    if steps < job.case.steps:
        return TraceComparison(why_not=f"both recorded {steps} of {job.case.steps} steps")
    walk = LockstepTraces(job, then, now)
    for step in range(steps):
        if reporter is not None:
            reporter.progress(step, "compare")
        walk.compare_step(step)
    return walk.result()
