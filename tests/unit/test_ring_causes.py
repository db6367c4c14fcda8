"""Causes of rings over chunks with a wrong index, round or length, with equal and uneven shards."""

from collections.abc import Sequence

import pytest
import torch

from distcheck.judge.diagnosis.measured import StepView
from distcheck.judge.diagnosis.measuring import explain
from distcheck.judge.oracles.rounding import Interval, interval
from distcheck.records import TensorSpec

SIZES = (40, 7, 96)  # none is divisible by 3
UNEVEN = {3: (86.0, 85.0, 85.0), 4: (7.0, 7.0, 6.0, 6.0)}
PARTIAL = "sums that lack some ranks"


class Exchanged(StepView):
    """A step of ranks whose gradients a function has synchronized."""

    step = 0

    def __init__(
        self, locals_: Sequence[Sequence[torch.Tensor]], reduced: Sequence[Sequence[torch.Tensor]],
        samples: Sequence[float],
    ) -> None:  # fmt: skip
        self._locals, self._reduced = locals_, reduced
        self._weights = [len(samples) * one / sum(samples) for one in samples]
        self.specs = tuple(
            TensorSpec(name=f"p{n}", shape=tuple(one.shape), dtype="float32")
            for n, one in enumerate(locals_[0])
        )

    ranks = property(lambda self: tuple(range(len(self._locals))))  # type: ignore[assignment]
    weights = property(lambda self: self._weights)  # type: ignore[assignment]
    unscaled = property(lambda self: [1.0] * len(self._locals))  # type: ignore[assignment]
    dtype = property(lambda self: "float32")  # type: ignore[assignment]

    def local(self, rank: int, index: int) -> torch.Tensor:
        return self._locals[rank][index]

    def seen(self, rank: int, index: int) -> torch.Tensor:
        return self._locals[rank][index]

    def reduced(self, rank: int, index: int) -> torch.Tensor:
        return self._reduced[rank][index]

    def digest(self, rank: int, index: int) -> bytes:
        return self.reduced(rank, index).numpy().tobytes()

    def interval(self, index: int, *, wire: str | None = None) -> Interval:
        world = len(self._locals)
        parts = [self._locals[rank][index] for rank in range(world)]
        shares = [weight / world for weight in self._weights]
        return interval(parts, shares, wire=getattr(torch, wire) if wire else None)


def ring(
    parts: Sequence[torch.Tensor], *, add: int = 0, gather: int = 0, start: int = 1, way: int = -1
) -> list[torch.Tensor]:
    """Return the ranks' results of a ring, with `add` and `gather` rounds fewer, and another index
    in its second half; of chunks that leave out a remainder if `way` is 0.
    """
    world = len(parts)
    held = [part.clone() for part in parts]
    size = len(parts[0]) // world
    if way:
        chunks = [list(one.tensor_split(world)) for one in held]
    else:
        chunks = [[one[size * k : size * (k + 1)] for k in range(world)] for one in held]
        way = -1
    for turn in range(world - 1 - add):
        sent = [chunks[r][(r - turn) % world].clone() for r in range(world)]
        for rank in range(world):
            chunks[rank][(rank - turn - 1) % world] += sent[rank - 1]
    for turn in range(world - 1 - gather):
        sent = [chunks[r][(r + start + way * turn) % world].clone() for r in range(world)]
        for rank in range(world):
            chunks[rank][(rank - 1 + start + way * turn) % world].copy_(sent[rank - 1])
    return [one / world for one in held]


def causes_of(world: int, *, samples: Sequence[float], **wrong: int) -> dict[str, str]:
    drawn = torch.Generator().manual_seed(world)
    local = [[torch.randn(n, generator=drawn) for n in SIZES] for _ in range(world)]
    results = [ring([local[r][n] for r in range(world)], **wrong) for n in range(len(SIZES))]
    reduced = [[result[rank] for result in results] for rank in range(world)]
    return {one.cause: one.evidence for one in explain(Exchanged(local, reduced, samples))}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize(
    ("wrong", "cause", "evidence"),
    [
        ({}, "", ""),
        ({"way": 0}, "partial-sync", "1/W of the local gradient"),
        ({"way": 1}, "dropped-rank", PARTIAL),
        ({"gather": 1}, "dropped-rank", PARTIAL),
        ({"add": 1}, "single-rank-gradient", "a single rank's local gradient"),
        ({"start": 0}, "single-rank-gradient", "a single rank's local gradient"),
    ],
    ids=["right", "remainder", "direction", "gather", "add", "start"],
)
def test_rings_over_chunks(wrong: dict[str, int], cause: str, evidence: str, world: int) -> None:
    """With uneven shards, the missing weights hide no other cause."""
    even = causes_of(world, samples=(1.0,) * world, **wrong)
    assert {*even} == ({cause} if cause else set())
    assert evidence in even.get(cause, "")
    uneven = causes_of(world, samples=UNEVEN[world], **wrong)
    assert {*uneven} == {*even, "unweighted-mean"}
    assert evidence in uneven.get(cause, "")
    whole = cause in ("", "single-rank-gradient")  # nothing is a mean
    assert whole or "the others are the unweighted mean over the ranks" in uneven[cause]


def test_integers_are_not_taken_for_roundings() -> None:
    """Small integers, and their sums, are representable in bfloat16 without any rounding."""
    local = [[torch.arange(1.0, 33.0).roll(5 * rank)] for rank in range(3)]
    plain = [[torch.stack([one[0] for one in local]).sum(0) / 3]] * 3
    found = explain(Exchanged(local, plain, UNEVEN[3]))
    assert [one.cause for one in found] == ["unweighted-mean"]
