"""Pairs the entries of two recordings of one training, in execution order, and defines the result
of their comparison. Does not import torch: tensors are equal if their digests are equal.

    initial state, then for each step: sample ids, random numbers, settings, loss, outputs,
    local gradients, exchanged gradients, gradients, and the state after it
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from distcheck.recordings.recording import OF_A_STEP, STATE, Entry, EntryState, Kind, Recording
from distcheck.records import Difference

INITIAL = "initial state"
NAMES = {
    Kind.OUTPUT: "outputs",
    Kind.LOCAL_GRADIENT: "local gradients",
    Kind.EXCHANGED: "reduced gradients",
    Kind.GRADIENT: "gradients",
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.OPTIMIZER: "optimizer's state",
}
# Recorded by value in every recording, or without a distance.
BY_VALUE = ("sample ids", "random numbers", "optimizer's settings", "loss")
# Choices of a training: after a different one nothing can be compared.
CHOSEN = (INITIAL, "sample ids", "random numbers", "optimizer's settings")
_IN_A_STEP = (Kind.OUTPUT, Kind.LOCAL_GRADIENT, Kind.EXCHANGED, Kind.GRADIENT)


@dataclass(frozen=True)
class Pair:
    """One item of a rank at a step in both recordings: two entries of the tensor at `index` or,
    without a `kind`, two values. `what` is one of the items in the module's list.
    """

    what: str
    rank: int
    step: int
    name: str
    one: Any
    two: Any
    kind: Kind | None = None
    slot: int = 0
    index: int = 0

    @property
    def is_same(self) -> bool:
        """Return True if both have the same digest or the same value; NaN equals NaN."""
        if isinstance(self.one, Entry):
            return (self.one.state, self.one.digest) == (self.two.state, self.two.digest)
        both = (self.one, self.two)
        not_numbers = all(isinstance(value, float) and math.isnan(value) for value in both)
        return self.one == self.two or not_numbers


def pairs_of_step(one: Recording, two: Recording, step: int) -> Iterator[Pair]:
    """Yield all pairs of a step. Pairs of the initial state precede those of the first step."""
    ranks = range(one.world)
    if step == 0:
        for kind in STATE:
            yield from _pairs_of_kind(one, two, INITIAL, kind, 0, step)
    for rank in ranks:
        first, second = one.header(rank, step), two.header(rank, step)
        for what, before, after in (
            ("sample ids", first.ids, second.ids),
            ("random numbers", first.rng_digest, second.rng_digest),
            ("optimizer's settings", first.optimizer, second.optimizer),
            ("loss", first.loss, second.loss),
        ):
            yield Pair(what, rank, step, what, before, after)
    for kind in (*_IN_A_STEP, *STATE):
        slot = step if kind in OF_A_STEP else step + 1
        yield from _pairs_of_kind(one, two, NAMES[kind], kind, slot, step)


def entry_pair(
    one: Recording, two: Recording, kind: Kind, *, slot: int, rank: int, index: int
) -> Pair:
    step = slot if kind in OF_A_STEP else max(0, slot - 1)
    first, second = (recording.entry(rank, kind, slot, index) for recording in (one, two))
    name = one.names(kind)[index]
    return Pair(NAMES[kind], rank, step, name, first, second, kind, slot, index)


def _pairs_of_kind(
    one: Recording, two: Recording, what: str, kind: Kind, slot: int, step: int
) -> Iterator[Pair]:
    if list(one.names(kind)) != list(two.names(kind)):
        return  # outputs that only one of them has
    for rank in range(one.world):
        for index, name in enumerate(one.names(kind)):
            first, second = (recording.entry(rank, kind, slot, index) for recording in (one, two))
            if EntryState.UNWRITTEN not in (first.state, second.state):
                yield Pair(what, rank, step, name, first, second, kind, slot, index)


class DifferenceCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of differences of one kind, over all steps and ranks."""

    kind: str
    tensors: int
    changed: int


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two traces.

    first        first bitwise difference in execution order; None if there is none
    kind         kind of `first`: initial state, sample ids, gradients, ...
    beyond       at the same step, the place that exceeds its bound most; None if all are within
    beyond_kind  kind of `beyond`, for two jobs, whose later steps are judged as well
    judged       number of elements at that step for which a bound could be derived
    not_judged   differing tensors at that step that have a bound, but only digests
    by_digest    True if one of the traces has only digests, so that distances are unknown
    moments      per kind, the numbers of compared and changed tensors
    drift        per step, the relative L2 distance of rank 0's parameters after it; empty by digest
    noise_floor  per step, the same distance for a run perturbed by one ULP
    why_not      reason that nothing could be compared, or ""
    """

    first: Difference | None = None
    kind: str = ""
    beyond: Difference | None = None
    beyond_kind: str = ""
    judged: int = 0
    not_judged: int = 0
    by_digest: bool = False
    moments: tuple[DifferenceCount, ...] = ()
    drift: tuple[float, ...] = ()
    noise_floor: tuple[float, ...] = ()
    why_not: str = ""
