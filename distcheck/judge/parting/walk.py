"""Two recordings of one training, side by side, in the order in which their ranks computed them."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from distcheck.judge.checks.comparison import Comparison, bitwise, by_norm, within
from distcheck.judge.checks.merging import share_of_bound
from distcheck.judge.checks.parted import compare_pair
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.differing import Pair, pair_of, pairs
from distcheck.recordings.recording import EntryState, Kind, Recording
from distcheck.records import Difference
from distcheck.records.parting import Moment, TraceComparison


class Bounds(Protocol):
    """How far two right results of one step may be apart; None where no bound is derived."""

    def loss(self, rank: int) -> float | None:
        """Of a rank's loss."""

    def has_local(self, rank: int) -> bool:
        """Whether `local` is derived."""

    def has_synced(self, index: int, *, same_inputs: bool) -> bool:
        """Whether `synced` is derived."""

    def local(self, rank: int, index: int) -> float | None:
        """Of a rank's gradient before the exchange, as an L2 norm."""

    def synced(self, index: int, *, same_inputs: bool) -> torch.Tensor | float | None:
        """Of the gradient after the exchange."""


class Walk:
    """Both recordings from their first step to the last; `bounds` are of the first that differs."""

    def __init__(
        self,
        then: Recording,
        now: Recording,
        *,
        tensors: bool = True,
        drifts_on: int = 0,
        bounds: Callable[[int], Bounds] | None = None,
    ) -> None:
        self._then, self._now, self._tensors = then, now, tensors
        self._bounds, self._drifts_on = bounds, drifts_on
        self._compared: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._first: Difference | None = None
        self._kind = ""
        self._beyond: Difference | None = None
        self._judged = self._not_judged = 0
        self._drift: list[float] = []

    def compare_step(self, step: int) -> None:
        """One step, in causal order; the first that differs is compared with bounds."""
        is_first = self._first is None
        changed = []
        for pair in pairs(self._then, self._now, step):
            self._compared[pair.what] += 1
            if not pair.is_same:
                changed.append(pair)
                self._changed[pair.what] += 1
                if self._first is None:
                    self._first, self._kind = self._place(pair), pair.what
        if self._tensors:
            self._drift.append(self._distance(step + 1))
        self._judge_step(step, changed, is_first=is_first)

    def result(self) -> TraceComparison:
        """What they have in common."""
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
            by_digest=not self._tensors,
            moments=tuple(moments),
            drift=tuple(self._drift),
        )

    def _place(
        self, pair: Pair, compare: Callable[[torch.Tensor, torch.Tensor], Comparison] = bitwise
    ) -> Difference | None:
        """The first difference of a pair under a way of comparing, if there is one."""
        tally = Tally(pair.what, "-")
        elements = compare_pair(
            tally, pair, self._then, self._now,
            name=pair.name, compare=compare, has_tensors=self._tensors,
        )  # fmt: skip
        self._judged += 0 if compare is bitwise else elements
        return tally.result().first

    def _judge_step(self, step: int, changed: Sequence[Pair], *, is_first: bool) -> None:
        """Compares what has `changed` in a step with bounds: the first such step."""
        has_bound = self._kind in ("loss", "outputs", "local gradients", "gradients")
        if is_first and has_bound and self._bounds is not None:
            self._hold_against(self._bounds(step), step)

    def _hold_against(self, bounds: Bounds, step: int) -> None:
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

    def _pair(self, kind: Kind, slot: int, rank: int, index: int) -> Pair:
        return pair_of(self._then, self._now, kind, slot=slot, rank=rank, index=index)

    def _judge(self, pair: Pair, bound: torch.Tensor | float) -> None:
        def compare(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
            if isinstance(bound, torch.Tensor):
                return within(actual, expected.double(), bound)
            return by_norm(actual, expected, bound)

        self._keep_worst(self._place(pair, compare))

    def _leave_unjudged(self, pair: Pair) -> None:
        """What has a bound and differs, by digest: a tensor that only one run has is beyond it."""
        if all(entry.state is EntryState.STORED for entry in (pair.one, pair.two)):
            self._not_judged += 1
        else:
            self._keep_worst(self._place(pair))

    def _keep_worst(self, place: Difference | None) -> None:
        if place is None:
            return
        if self._beyond is None or share_of_bound(place) > share_of_bound(self._beyond):
            self._beyond = place

    def _distance(self, slot: int) -> float:
        difference = norm = 0.0
        for index in range(len(self._then.names(Kind.PARAMETER))):
            one, two = (
                recording.tensor(self._drifts_on, Kind.PARAMETER, slot, index)
                for recording in (self._then, self._now)
            )
            if one is not None and two is not None:
                wide = torch.complex128 if one.is_complex() else torch.float64
                norm += float(one.to(wide).norm()) ** 2
                if not self._pair(Kind.PARAMETER, slot, self._drifts_on, index).is_same:
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
