"""Causes from numbers: weights in, the right cause or ambiguity out, none for a right result."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from distcheck.judge.diagnosis import diagnose, gradients
from distcheck.judge.diagnosis.gradients import explain_step
from distcheck.judge.diagnosis.measurements import (
    GradientFit,
    GradientMatch,
    Measurements,
    ParameterFacts,
    StepFacts,
)
from distcheck.judge.diagnosis.measuring import permuted_matches
from distcheck.judge.oracles.rounding import Interval
from distcheck.machine.numerics import gamma
from distcheck.records import CheckResult, Difference, Outcome

SIZES = (40, 7, 90)
UNIT = 2.0**-24

Weights = Sequence[Sequence[float]]  # per rank, what each rank's gradient counts for


def shard_gradients(world: int, seed: int) -> list[torch.Tensor]:
    """Per parameter [n, world], float32 values in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, world, generator=generator) * (1 + torch.arange(world)) + 0.5).double()
        for n in SIZES
    ]


def combined(columns: torch.Tensor, weights: Sequence[float], rank: int) -> torch.Tensor:
    """sum w_r g_r in float32, one rounding at a time, ranks in an order of the rank's own."""
    total = torch.zeros(len(columns))
    for r in range(rank, rank + columns.shape[1]):
        r %= columns.shape[1]
        total = total + columns[:, r].float() * torch.tensor(weights[r])
    return total.double()


def measured(
    weights: Weights, shares: Sequence[float], *, seed: int = 0, only: Sequence[int] = (0, 1, 2)
) -> StepFacts:
    """A step whose parameters `only` came out with `weights`; the others are right."""
    world = len(shares)
    allowed = gamma(world + 5, UNIT)
    parameters, systems, targets = [], [], []
    every = shard_gradients(world, seed)
    for index in only:
        columns = every[index]
        results = [combined(columns, weights[rank], rank) for rank in range(world)]
        q, r = torch.linalg.qr(columns)
        mean = columns @ torch.tensor(shares, dtype=torch.float64)
        bound = allowed * (columns.abs() @ torch.tensor(shares, dtype=torch.float64))
        own = [columns[:, rank] for rank in range(world)]
        is_mean = [(y - mean).abs() <= bound for y in results]
        is_own = [(y - o).abs() <= 4 * UNIT * o.abs() for y, o in zip(results, own, strict=True)]
        size = float(columns.norm())
        systems.append(r / size)
        targets.append([q.T @ y / size for y in results])
        parameters.append(
            ParameterFacts(
                name=f"p{index}",
                elements=len(columns),
                norms=tuple(columns.norm(dim=0).tolist()),
                basis=tuple(tuple(row) for row in r.tolist()),
                projected=tuple(tuple((q.T @ y).tolist()) for y in results),
                remainder=tuple(float((y - q @ (q.T @ y)).norm()) for y in results),
                floor=1e-40,
                wrong=tuple(rank for rank in range(world) if not bool(is_mean[rank].all())),
                of_mean=tuple(int(m.sum()) for m in is_mean),
                of_own=tuple(int(o.sum()) for o in is_own),
                of_either=tuple(int((m | o).sum()) for m, o in zip(is_mean, is_own, strict=True)),
                shorter=("",) * world,
                on_grid=(False,) * world,
            )
        )
    system = torch.cat(systems)
    inverse = torch.linalg.pinv(system)
    norms = [float(torch.cat([c[:, r] for c in every]).norm()) for r in range(world)]
    return StepFacts(
        step=0,
        shares=tuple(shares),
        gamma=allowed,
        unit=UNIT,
        parameters=tuple(parameters),
        total=len(SIZES),
        fits=tuple(
            GradientFit(
                coefficients=tuple((inverse @ torch.cat([t[rank] for t in targets])).tolist()),
                tolerance=(1e-5,) * world,
                residual=0.0,
                identified=True,
            )
            for rank in range(world)
        ),
        left_norms=tuple(norms),
        left_factors=(1.0,) * world,
        left_elements=sum(SIZES),
        mean_of_left=False,
        matches=(),
        alike=(tuple(range(world)),),
        unchanged=(),
        missing=(),
        not_finite=None,
    )


def causes(step: StepFacts) -> set[str]:
    return {finding.cause for finding in explain_step(step)}


worlds = st.integers(2, 6)
seeds = st.integers(0, 50)


@st.composite
def unequal_shares(draw: st.DrawFn) -> list[float]:
    sizes = draw(st.lists(st.integers(1, 90), min_size=2, max_size=6))
    assume(len(set(sizes)) > 1)
    return [size / sum(sizes) for size in sizes]


def equal(world: int) -> list[float]:
    return [1 / world] * world


@given(worlds, seeds)
@settings(max_examples=15, deadline=None)
def test_a_right_mean_has_no_cause(world: int, seed: int) -> None:
    assert not causes(measured([equal(world)] * world, equal(world), seed=seed))


@given(unequal_shares(), seeds)
@settings(max_examples=15, deadline=None)
def test_a_right_weighted_mean_has_no_cause(shares: list[float], seed: int) -> None:
    assert not causes(measured([shares] * len(shares), shares, seed=seed))


@given(worlds, seeds, st.floats(0.01, 30))
@settings(max_examples=30, deadline=None)
def test_scales(world: int, seed: int, factor: float) -> None:
    assume(abs(factor - 1) > 1e-4)
    near = {
        "missing-division": abs(factor - world) < 1e-4,
        "double-division": abs(factor - 1 / world) < 1e-4,
    }
    assume(not any(near.values()))
    scaled = [factor / world] * world
    assert causes(measured([scaled] * world, equal(world), seed=seed)) == {"wrong-divisor"}


@given(worlds, seeds, st.sampled_from([(1, "missing-division"), (-1, "double-division")]))
@settings(max_examples=20, deadline=None)
def test_named_scales(world: int, seed: int, scale: tuple[int, str]) -> None:
    weights = [float(world) ** scale[0] / world] * world
    for only in ((0, 1, 2), (1,)):
        assert causes(measured([weights] * world, equal(world), seed=seed, only=only)) == {scale[1]}


@given(unequal_shares(), seeds, st.sampled_from([1.0, 3.7]))
@example([1 / 3, 2 / 3], 0, 1.0)  # also: the first rank twice, divided by the samples that count
@settings(max_examples=20, deadline=None)
def test_plain_means(shares: list[float], seed: int, factor: float) -> None:
    world = len(shares)
    weights = [factor / world] * world
    found = causes(measured([weights] * world, shares, seed=seed))
    expected = {"unweighted-mean"} | ({"wrong-divisor"} if factor != 1.0 else set())
    # Shares of 1/3 and 2/3: the first counted twice is a plain mean, too.
    counts = [max(shares) / share for share in shares]
    if all(math.isclose(count, round(count)) for count in counts) and max(counts) < world + 0.5:
        expected.add("duplicated-rank")
    assert found == expected


@pytest.mark.parametrize(
    ("factor", "first"),
    [(2 / 3, "wrong-divisor"), (3.0, "missing-division"), (1.001, "unweighted-mean")],
)
def test_the_cause_that_explains_most_of_the_error_comes_first(factor: float, first: str) -> None:
    """Shards of 86, 85 and 85: weights that are off by under 1 %, and a factor beside them."""
    shares = (86 / 256, 85 / 256, 85 / 256)
    found = explain_step(measured([[factor / 3] * 3] * 3, shares))
    assert found[0].cause == first
    assert "unweighted-mean" in {finding.cause for finding in found}


@given(worlds, seeds)
@settings(max_examples=15, deadline=None)
def test_every_rank_alone(world: int, seed: int) -> None:
    own = [[float(r == rank) for r in range(world)] for rank in range(world)]
    assert causes(measured(own, equal(world), seed=seed)) == {"missing-sync"}
    part = causes(measured(own, equal(world), seed=seed, only=(0, 2)))
    assert part == {"partial-sync"}


@given(worlds, seeds, st.data())
@settings(max_examples=30, deadline=None)
def test_one_rank_for_all(world: int, seed: int, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, world - 1))
    weights = [float(r == source) for r in range(world)]
    found = explain_step(measured([weights] * world, equal(world), seed=seed))
    if world == 2:  # one of two is given, the other dropped, or the one taken twice: all the same
        assert {f.cause for f in found} == {
            "single-rank-gradient", "dropped-rank", "duplicated-rank",
        }  # fmt: skip
        assert all("cannot tell this from" in f.evidence for f in found)
    else:
        assert [f.cause for f in found] == ["single-rank-gradient"]


@given(st.integers(3, 6), seeds, st.data())
@settings(max_examples=30, deadline=None)
def test_counted(world: int, seed: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    assume(sum(map(bool, counts)) >= 2 and len(set(counts)) > 1)
    assume(1 in counts)
    divisor = data.draw(st.sampled_from([world, sum(counts), sum(map(bool, counts))]))
    weights = [count / divisor for count in counts]
    found = causes(measured([weights] * world, equal(world), seed=seed))
    # 1/4, 1/4 and 1/2 are also what (a + b) / 2 leaves, twice.
    also = {"chained-mean"} if (sorted(counts), divisor) == ([1, 1, 2], 4) else set()
    assert found == {"duplicated-rank" if 2 in counts else "dropped-rank", *also}


def test_a_mean_that_was_clipped_is_told_by_its_norm() -> None:
    """Of some parameters alone, or of a mean that is too large, a norm says nothing."""
    mean = torch.cat([columns.mean(dim=1) for columns in shard_gradients(3, 0)])
    assert mean.norm() > 4
    for only, most, told in (
        ((0, 1, 2), 0.5, True), ((0, 1, 2), 2.0, True), ((0, 1, 2), 0.53, False),
        ((0, 1), 0.5, False), ((0, 1, 2), 80.0, False),
    ):  # fmt: skip
        share = most / float(mean.norm() + 1e-6) / 3
        (found,) = explain_step(measured([[share] * 3] * 3, equal(3), only=only))
        assert found.cause == "wrong-divisor"
        assert (f"norm is {most:g}, as after clipping" in found.evidence) is told
        assert (f"Training(clip_norm={most:g})" in found.suggestion) is told


@given(st.integers(2, 6), seeds, st.floats(0.3, 1.1))
@settings(max_examples=20, deadline=None)
def test_clipping_before(world: int, seed: int, share: float) -> None:
    norms = measured([equal(world)] * world, equal(world), seed=seed).left_norms
    most = share * max(norms)
    assume(abs(most / max(norms) - 1) > 1e-3 and most < max(norms))
    weights = [min(1.0, most / norm) / world for norm in norms]
    found = causes(measured([weights] * world, equal(world), seed=seed))
    ratios = [one / other for one in weights for other in weights]
    whole = all(min(r % 1, -r % 1) < 1e-4 for r in ratios if r >= 1)  # looks like counting as well
    assert found == {"clip-before-sync"} or (whole and "clip-before-sync" in found)


@given(st.integers(3, 6), seeds, st.data())
@settings(max_examples=30, deadline=None)
def test_no_guesses(world: int, seed: int, data: st.DataObject) -> None:
    """Weights with no rule to them have no name, and are shown as they are."""
    drawn = data.draw(st.lists(st.floats(0.11, 0.97), min_size=world, max_size=world))
    ratios = [a / b for a in drawn for b in drawn if a != b]
    assume(len(set(drawn)) == world)
    assume(all(abs(ratio - round(ratio)) > 1e-3 for ratio in ratios))
    step = measured([drawn] * world, equal(world), seed=seed)
    norms = step.left_norms
    products = [w * n for w, n in zip(drawn, norms, strict=True)]
    assume(max(products) - min(products) > 1e-3 * max(products))
    assume(not 0.9999 < max(drawn) * world < 1.0001)
    assert not causes(step)
    assert "the ranks' gradients have weights" in gradients.describe_unexplained(
        Measurements(world=world, steps=(step,))
    )


@pytest.mark.parametrize("world", [3, 4])
def test_a_reduce_without_broadcast(world: int) -> None:
    left = [equal(world)] + [[0.3 * (r + 1) for r in range(world)]] * (world - 1)
    assert causes(measured(left, equal(world))) == {"single-rank-gradient"}


def test_what_a_missing_broadcast_leaves_on_the_other_rank_is_not_a_second_cause() -> None:
    """Nor where a parameter is right, so that it might be a part that is never exchanged."""
    part = measured([equal(2), [0.0, 1.0]], equal(2), only=(0, 1))
    assert causes(part) == {"single-rank-gradient"}
    forgotten = measured([[1.0, 0.0], [0.0, 1.0]], equal(2), only=(2,))
    together = explain_step(
        msgspec.structs.replace(part, parameters=(*part.parameters, *forgotten.parameters))
    )
    of = {found.cause: found.evidence for found in together}
    assert "p0, p1 (2 of 3" in of["single-rank-gradient"]
    assert "p2 (1 of 3" in of["partial-sync"]


def test_one_damaged_element_leaves_a_rank_its_mean() -> None:
    """At two ranks the other one "alone holds the mean"; that is no missing broadcast."""
    step = measured([equal(2), [0.31, 0.83]], equal(2))
    assert causes(step) == {"single-rank-gradient"}
    damaged = tuple(
        msgspec.structs.replace(p, of_mean=(p.elements, p.elements - 1)) for p in step.parameters
    )
    assert "single-rank-gradient" not in causes(msgspec.structs.replace(step, parameters=damaged))


def test_a_lone_element_is_no_evidence_for_a_factor() -> None:
    lone = measured([[0.3] * 4] * 4, equal(4), only=(1,))
    one = lone.parameters[0]
    cut = ParameterFacts(
        name=one.name, elements=1, norms=(1.0, 2.0, 3.0, 4.0), basis=((1.0, 2.0, 3.0, 4.0),),
        projected=((7.1,),) * 4, remainder=(0.0,) * 4, floor=0.0, wrong=(0, 1, 2, 3),
        of_mean=(0,) * 4, of_own=(0,) * 4, of_either=(0,) * 4,
        shorter=("",) * 4, on_grid=(False,) * 4,
    )  # fmt: skip
    import msgspec

    assert not causes(msgspec.structs.replace(lone, parameters=(cut,)))


def failed(check: str, layer: str = "-") -> CheckResult:
    place = Difference(
        parameter="p0", rank=1, step=2, index=(), actual=1.0, expected=2.0, error=1.0, bound=0.0
    )
    return CheckResult(check=check, layer=layer, verdict="fail", first=place, worst=place)


ENDS = [Outcome(rank=rank, outcome="finished") for rank in range(4)]


def named(results: list[CheckResult], facts: Measurements | None = None) -> list[str]:
    found = diagnose(ENDS, results, facts)
    assert all(d.evidence and d.suggestion for d in found)
    return [d.cause for d in found]


def test_what_did_not_fail_has_no_cause() -> None:
    passed = CheckResult(check="gradients", layer="rounding", verdict="pass")
    wrong = measured([[1.0] * 4] * 4, equal(4))
    assert named([passed], Measurements(world=4, steps=(wrong,))) == []


def test_a_case_without_a_closer_look_is_unexplained() -> None:
    assert named([failed("gradients", "rounding")]) == ["unexplained"]
    trouble = diagnose(
        ENDS, [failed("gradients", "rounding")], Measurements(world=4, trouble="no memory")
    )
    assert "no memory" in trouble[0].evidence


@given(st.integers(3, 6), seeds, st.data())
@settings(max_examples=20, deadline=None)
def test_counted_differently_on_every_rank(world: int, seed: int, data: st.DataObject) -> None:
    """As rings leave it: what rank 0 has of rank r, rank k has of rank r + k."""
    counts = data.draw(st.lists(st.integers(0, 2), min_size=world, max_size=world))
    assume(sum(map(bool, counts)) >= 2 and len(set(counts)) > 1)
    assume(1 in counts)
    weights = [[counts[(r - rank) % world] / world for r in range(world)] for rank in range(world)]
    found = causes(measured(weights, equal(world), seed=seed))
    assert found == {"duplicated-rank" if 2 in counts else "dropped-rank"}


def test_a_gradient_that_one_rank_lacks() -> None:
    step = msgspec.structs.replace(measured([equal(2)] * 2, equal(2)), parameters=())
    lacks = msgspec.structs.replace(step, missing=(("p0", 1),), missing_elsewhere=True)
    assert causes(lacks) == {"partial-sync"}
    assert not causes(msgspec.structs.replace(lacks, missing_elsewhere=False))


def test_zeros_are_stale_only_if_the_next_step_is() -> None:
    zeros = measured([[0.0, 0.0]] * 2, equal(2))
    other = msgspec.structs.replace(measured([[0.3, 0.9]] * 2, equal(2)), step=1)
    matches = tuple(
        GradientMatch(kind="earlier", rank=rank, parameter=p.name, distance=0.0, bound=1.0, step=0)
        for p in other.parameters
        for rank in p.wrong
    )
    stale = msgspec.structs.replace(other, matches=matches)
    found = gradients.explain(Measurements(world=2, steps=(zeros, stale)))
    assert [diagnosis.cause for diagnosis in found] == ["stale-gradient"]
    assert "step 0: ranks hold zeros" in found[0].evidence
    assert not gradients.explain(Measurements(world=2, steps=(zeros, other)))


@dataclass(frozen=True)
class _Held:
    """As much of `Measured` as a permutation is told from."""

    name: str
    interval: Interval
    held: torch.Tensor
    wrong: tuple[int, ...] = (0,)

    @property
    def elements(self) -> int:
        return self.held.numel()

    def result(self, rank: int) -> torch.Tensor:
        return self.held


@pytest.mark.parametrize(("moves", "matches"), [(True, 1), (False, 0)])
def test_elements_in_their_place_are_no_permutation(moves: bool, matches: int) -> None:
    mean = torch.arange(1.0, 41.0, dtype=torch.float64)
    bound = torch.full_like(mean, 1e-6)
    held = mean.flip(0) if moves else mean.clone()
    held[0] += 2e-6  # one element is out of its own bound, and within that of all together
    one = _Held("p0", Interval(mean, bound), held)
    assert len(list(permuted_matches([one]))) == matches  # type: ignore[list-item]


def test_noise_on_many_small_elements_is_no_permutation() -> None:
    """Sorted, they come close: there is another one near each. Theirs are the bounds that count."""
    generator = torch.Generator().manual_seed(1)
    small, noise = torch.randn(2, 10_000, generator=generator, dtype=torch.float64)
    mean = torch.cat([torch.arange(1.0, 41.0, dtype=torch.float64), small * 1e-5])
    bound = 1e-8 * mean.abs()
    held = mean.clone()
    held[40:] += 3e-8 * noise
    assert float((held - mean).norm()) > float(bound.norm())
    assert float((held.sort().values - mean.sort().values).norm()) < float(bound.norm())
    one = _Held("p0", Interval(mean, bound), held)
    assert list(permuted_matches([one])) == []  # type: ignore[list-item]
