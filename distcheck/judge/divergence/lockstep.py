"""Compares two recordings of one training, in execution order."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from distcheck.judge.checks.comparison import Comparison, compare_bitwise
from distcheck.judge.checks.matching import compare_pair
from distcheck.judge.checks.tally import Tally
from distcheck.recordings.differing import (
    DifferenceCount,
    Pair,
    TraceComparison,
    entry_pair,
    pairs_of_step,
)
from distcheck.recordings.recording import Kind, Recording
from distcheck.records import Difference


class LockstepComparison:
    """Two recordings from their first step to the last."""

    def __init__(
        self,
        then: Recording,
        now: Recording,
        *,
        tensors: bool = True,
        drifts_on: int = 0,
    ) -> None:
        self._then, self._now, self._tensors = then, now, tensors
        self._drifts_on = drifts_on
        self._compared: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._first: Difference | None = None
        self._kind = ""
        self._beyond: Difference | None = None
        self._judged = self._not_judged = 0
        self._drift: list[float] = []

    def compare_step(self, step: int) -> None:
        """Compare one step in causal order, and the first difference with its bounds."""
        is_first = self._first is None
        changed = []
        for pair in pairs_of_step(self._then, self._now, step):
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
        moments = [
            DifferenceCount(kind=kind, tensors=count, changed=self._changed[kind])
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
        self,
        pair: Pair,
        compare: Callable[[torch.Tensor, torch.Tensor], Comparison] = compare_bitwise,
    ) -> Difference | None:
        """Return the first difference of a pair under a comparison, if any."""
        tally = Tally(pair.what, "-")
        elements = compare_pair(
            tally, pair, self._then, self._now,
            name=pair.name, compare=compare, has_tensors=self._tensors,
        )  # fmt: skip
        self._judged += 0 if compare is compare_bitwise else elements
        return tally.result().first

    def _judge_step(self, step: int, changed: Sequence[Pair], *, is_first: bool) -> None:
        """Compare the `changed` pairs of a step with bounds."""
        raise NotImplementedError

    def _pair(self, kind: Kind, slot: int, rank: int, index: int) -> Pair:
        return entry_pair(self._then, self._now, kind, slot=slot, rank=rank, index=index)

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
