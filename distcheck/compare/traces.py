"""Compares two traces of one case, in the order in which their ranks computed them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from distcheck.compare.differing import StepBounds
from distcheck.compare.records import COMPARE, CompareRequest, Moment, TraceComparison
from distcheck.judge.checks.comparison import Comparison, bitwise, by_norm, within
from distcheck.judge.checks.merging import share_of_bound
from distcheck.judge.checks.tally import Tally
from distcheck.machine import seeds
from distcheck.records import Difference
from distcheck.training.traces.layout import EntryState, Kind
from distcheck.training.traces.reader import TraceReader
from distcheck.worlds.jobs import Descriptors
from distcheck.worlds.reporter import Reporter

INITIAL = "initial state"
_STATE = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)
_NAMES = {
    Kind.OUTPUT: "outputs",
    Kind.LOCAL_GRADIENT: "local gradients",
    Kind.GRADIENT: "gradients",
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.OPTIMIZER: "optimizer's state",
}


_WORDS = {
    EntryState.UNWRITTEN: "not recorded",
    EntryState.ABSENT: "not there",
    EntryState.STORED: "there",
    EntryState.MALFORMED: "of another shape or dtype",
}


@COMPARE.does
def compare_job(job: CompareRequest, fds: Descriptors, reporter: Reporter) -> TraceComparison:
    """Compares all of both traces."""
    seeds.pin_determinism()
    then, now = (
        TraceReader(fds[name], layout, tensors=job.tensors)
        for name, layout in zip(COMPARE.descriptors, job.layouts, strict=True)
    )
    return compare_traces(job, then, now, reporter)


def compare_traces(
    job: CompareRequest, then: TraceReader, now: TraceReader, reporter: Reporter | None = None
) -> TraceComparison:
    """Everything that both recorded, by digest; values are looked at where digests differ, if the
    job has tensors.
    """
    if then.layout.model != now.layout.model:
        return TraceComparison(why_not="the model has other parameters, buffers or optimizer state")
    steps = min(then.steps_written(), now.steps_written())
    if steps < job.case.steps:
        return TraceComparison(why_not=f"both recorded {steps} of {job.case.steps} steps")
    pair = _Pair(job, then, now)
    for step in range(steps):
        if reporter is not None:
            reporter.progress(step, "compare")
        pair.compare_step(step)
    return pair.result()


class _Pair:
    def __init__(self, job: CompareRequest, then: TraceReader, now: TraceReader) -> None:
        self._job, self._then, self._now = job, then, now
        self._ranks = range(then.layout.world)
        self._compared: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._first: Difference | None = None
        self._kind = ""
        self._beyond: Difference | None = None
        self._judged = self._not_judged = 0
        self._drift: list[float] = []

    def compare_step(self, step: int) -> None:
        """One step, in causal order; the first that differs is compared with bounds."""
        before = self._first
        if step == 0:
            for kind in _STATE:
                self._compare_kind(INITIAL, kind, 0, step)
        self._compare_headers(step)
        if self._then.layout.outputs == self._now.layout.outputs:
            self._compare_kind(_NAMES[Kind.OUTPUT], Kind.OUTPUT, step, step)
        self._compare_kind(_NAMES[Kind.LOCAL_GRADIENT], Kind.LOCAL_GRADIENT, step, step)
        self._compare_kind(_NAMES[Kind.GRADIENT], Kind.GRADIENT, step, step)
        for kind in _STATE:
            self._compare_kind(_NAMES[kind], kind, step + 1, step)
        if self._job.tensors:
            self._drift.append(self._distance(step + 1))
        if before is None and self._kind in ("loss", "outputs", "local gradients", "gradients"):
            self._hold_against_bounds(step)

    def result(self) -> TraceComparison:
        moments = [
            Moment(kind=kind, tensors=count, changed=self._changed[kind])
            for kind, count in self._compared.items()
        ]
        return TraceComparison(
            first=self._first,
            kind=self._kind,
            beyond=self._beyond,
            judged=self._judged,
            not_judged=self._not_judged,
            by_digest=not self._job.tensors,
            moments=tuple(moments),
            drift=tuple(self._drift),
        )

    def _compare_headers(self, step: int) -> None:
        for rank in self._ranks:
            one, two = self._then.header(rank, step), self._now.header(rank, step)
            same_loss = one.loss == two.loss or (math.isnan(one.loss) and math.isnan(two.loss))
            for kind, same, there, here in (
                ("sample ids", one.ids == two.ids, "other ids", "other ids"),
                ("random numbers", one.rng_digest == two.rng_digest,
                 one.rng_digest.hex()[:8], two.rng_digest.hex()[:8]),
                ("loss", same_loss, one.loss, two.loss),
            ):  # fmt: skip
                self._compared[kind] += 1
                if not same:
                    self._changed[kind] += 1
                    tally = Tally(kind, "-")
                    tally.fail("", parameter=kind, rank=rank, step=step, actual=here,
                               expected=there)  # fmt: skip
                    self._note(kind, tally.result().first)

    def _compare_kind(self, name: str, kind: Kind, slot: int, step: int) -> None:
        for rank, index in self._places(kind):
            one = self._then.entry(rank, kind, slot, index)
            two = self._now.entry(rank, kind, slot, index)
            if EntryState.UNWRITTEN in (one.state, two.state):
                continue
            self._compared[name] += 1
            if (one.state, one.digest) == (two.state, two.digest):
                continue
            self._changed[name] += 1
            if self._first is None:
                self._note(name, self._place(kind, slot, index, rank, step, bitwise))

    def _places(self, kind: Kind) -> Iterator[tuple[int, int]]:
        for rank in self._ranks:
            for index in range(len(self._then.layout.specs(kind))):
                yield rank, index

    def _note(self, kind: str, place: Difference | None) -> None:
        if self._first is None and place is not None:
            self._first, self._kind = place, kind

    def _place(
        self,
        kind: Kind,
        slot: int,
        index: int,
        rank: int,
        step: int,
        compare: Callable[[torch.Tensor, torch.Tensor], Comparison],
    ) -> Difference | None:
        """The first difference of two tensors under a way of comparing, if there is one; without
        tensors, that of their digests.
        """
        name = self._then.layout.specs(kind)[index].name
        tally = Tally(_NAMES[kind], "-")
        one, two = (t.entry(rank, kind, slot, index) for t in (self._then, self._now))
        if one.state is not EntryState.STORED or two.state is not EntryState.STORED:
            there, here = _WORDS[one.state], _WORDS[two.state]
            if there != here:
                tally.fail("", parameter=name, rank=rank, step=step, actual=here, expected=there)
        elif not self._job.tensors:
            there, here = (f"digest {entry.digest.hex()[:8]}" for entry in (one, two))
            tally.fail("", parameter=name, rank=rank, step=step, actual=here, expected=there)
        else:
            actual = self._now.tensor(rank, kind, slot, index)
            expected = self._then.tensor(rank, kind, slot, index)
            assert actual is not None, "it is stored"
            assert expected is not None, "it is stored"
            comparison = compare(actual, expected)
            self._judged += 0 if compare is bitwise else comparison.elements
            tally.add(comparison, parameter=name, rank=rank, step=step)
        return tally.result().first

    def _hold_against_bounds(self, step: int) -> None:
        bounds = StepBounds(self._job, self._then, step)
        for rank in self._ranks:
            before, after = (t.header(rank, step).loss for t in (self._then, self._now))
            limit = bounds.loss(rank)
            if limit is not None and before != after:
                self._judged += 1
                self._keep_worst(_far_loss(rank, step, after, before, limit))
        self._hold_gradients(bounds, step)

    def _hold_gradients(self, bounds: StepBounds, step: int) -> None:
        changed_inputs = set()
        for rank, index in self._places(Kind.LOCAL_GRADIENT):
            if self._same(rank, Kind.LOCAL_GRADIENT, step, index):
                continue
            changed_inputs.add(index)
            if not self._job.tensors:
                if bounds.has_local(rank):
                    self._leave_unjudged(Kind.LOCAL_GRADIENT, step, rank, index)
                continue
            limit = bounds.local(rank, index)
            if limit is not None:
                self._judge(Kind.LOCAL_GRADIENT, step, rank, index, limit)
        for rank, index in self._places(Kind.GRADIENT):
            if self._same(rank, Kind.GRADIENT, step, index):
                continue
            same_inputs = index not in changed_inputs
            if not self._job.tensors:
                if bounds.has_synced(index, same_inputs=same_inputs):
                    self._leave_unjudged(Kind.GRADIENT, step, rank, index)
                continue
            bound = bounds.synced(index, same_inputs=same_inputs)
            if bound is not None:
                self._judge(Kind.GRADIENT, step, rank, index, bound)

    def _same(self, rank: int, kind: Kind, slot: int, index: int) -> bool:
        one, two = (t.entry(rank, kind, slot, index) for t in (self._then, self._now))
        return (one.state, one.digest) == (two.state, two.digest)

    def _judge(
        self, kind: Kind, step: int, rank: int, index: int, bound: torch.Tensor | float
    ) -> None:
        def compare(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
            if isinstance(bound, torch.Tensor):
                return within(actual, expected.double(), bound)
            return by_norm(actual, expected, bound)

        self._keep_worst(self._place(kind, step, index, rank, step, compare))

    def _leave_unjudged(self, kind: Kind, step: int, rank: int, index: int) -> None:
        """What has a bound and differs, by digest: a tensor that only one run has is beyond it."""
        entries = [t.entry(rank, kind, step, index) for t in (self._then, self._now)]
        if all(entry.state is EntryState.STORED for entry in entries):
            self._not_judged += 1
        else:
            self._keep_worst(self._place(kind, step, index, rank, step, bitwise))

    def _keep_worst(self, place: Difference | None) -> None:
        if place is None:
            return
        if self._beyond is None or share_of_bound(place) > share_of_bound(self._beyond):
            self._beyond = place

    def _distance(self, slot: int) -> float:
        difference = norm = 0.0
        first = self._job.case.with_data[0]
        for index in range(len(self._then.layout.specs(Kind.PARAMETER))):
            one = self._then.tensor(first, Kind.PARAMETER, slot, index)
            two = self._now.tensor(first, Kind.PARAMETER, slot, index)
            if one is not None and two is not None:
                wide = torch.complex128 if one.is_complex() else torch.float64
                norm += float(one.to(wide).norm()) ** 2
                if not self._same(first, Kind.PARAMETER, slot, index):
                    difference += float((one.to(wide) - two.to(wide)).norm()) ** 2
        return math.sqrt(difference / norm) if norm else 0.0


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
