"""What may be accepted, what is refused; bounds that hold and are no wider than they must be."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcheck.contract import Contract
from distcheck.errors import UsageError
from distcheck.judge import acceptance
from distcheck.judge.oracles import low_rank, quantum
from distcheck.judge.oracles.rounding import interval
from distcheck.machine.numerics import NotBoundedError, unit_roundoff
from distcheck.plan.cases import plan_cases
from distcheck.plan.settings import Request
from distcheck.records import Case

U = unit_roundoff(torch.float32)


@pytest.mark.parametrize(
    ("asked", "spelled"),
    [
        ("low-precision:bf16", "low-precision:bf16"),
        ("low-precision:bfloat16", "low-precision:bf16"),
        ("low-precision:float16", "low-precision:fp16"),
        ("low-precision:fp32", "low-precision:fp32"),
        ("quantized:08", "quantized:8"),
        ("quantized:8:stochastic:block=64", "quantized:8:block=64:stochastic"),
        ("sparse:0.010", "sparse:0.01"),
        ("sparse:20:whole:random", "sparse:20:random:whole"),
        ("error-feedback", "error-feedback"),
        ("error-feedback:sign", "error-feedback:sign"),
        ("error-feedback:quantized=4", "error-feedback:quantized=4"),
        ("low-rank:2", "low-rank:2"),
        ("low-rank:2:no-feedback", "low-rank:2:no-feedback"),
        ("local-sgd:4", "local-sgd:4"),
        ("local-sgd:4:state=mean:phase=0", "local-sgd:4:phase=0:state=mean"),
        ("local-sgd:2:state=local:groups=2:global=8", "local-sgd:2:groups=2:global=8"),
    ],
)
def test_kinds(asked: str, spelled: str) -> None:
    assert acceptance.canonical_spelling(asked) == spelled
    case = Case(id="a", strategy="b", world=4, accept=spelled)
    allowance = acceptance.describe_acceptance(case)
    assert allowance is not None
    assert allowance.widened
    assert allowance.not_owed
    assert case.adapter_options == ["--accept", spelled]


@pytest.mark.parametrize(
    "asked",
    [
        "", "anything", "low-precision", "low-precision:fp8", "quantized:", "quantized:x",
        "quantized:8:no-feedback", "low-rank:2:", "low-rank:-1", "local-sgd:2:3", "tolerance:0.1",
        "QUANTIZED:8", "quantized:８",
    ],
)  # fmt: skip
def test_what_has_no_bound_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match=r"is not supported.*; (choose from low|expected )"):
        acceptance.parse_deviation(asked)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("local-sgd:4:phase=4", "phase=4 is not below the period 4"),
        ("local-sgd:4:groups=2:global=6", "global=6 is not a multiple of the period 4"),
        ("local-sgd:4:global=8", "global= needs groups=SIZE"),
        ("local-sgd:4:phase=1:phase=2", "sets phase twice"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(asked: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        acceptance.parse_deviation(asked)


def test_groups_must_divide_the_world() -> None:
    case = Case(id="a", strategy="b", world=4, accept="local-sgd:2:groups=3")
    with pytest.raises(UsageError, match="does not divide a world of 4 into several groups of 3"):
        acceptance.check_promise(case, Contract())


@pytest.mark.parametrize(
    "asked", ["quantized:1", "quantized:17", "low-rank:0", "local-sgd:0", "local-sgd:2:groups=1"]
)
def test_what_is_out_of_range_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match=r"is out of range; .* takes"):
        acceptance.parse_deviation(asked)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("sparse:1.5", "1.5 is neither a number of elements nor a fraction below 1"),
        ("sparse:0", "is out of range; amount of sparse takes"),
        ("sparse:10:first", "expected sparse:K"),
        ("quantized:8:block=1", "is out of range; block of quantized takes 2 to"),
        ("error-feedback:sign:quantized=4", "name one compressor"),
    ],
)
def test_settings_of_compressors_are_checked(asked: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        acceptance.parse_deviation(asked)
    with pytest.raises(UsageError, match=r"requires two steps.*; pass --steps 2 or more"):
        plan_cases(request("sparse:0.01", steps=1))


def request(accept: str, **asked: object) -> Request:
    return Request(strategies=("allreduce",), accept=accept, **asked)  # type: ignore[arg-type]


def test_what_makes_no_sense_together_is_refused() -> None:
    with pytest.raises(UsageError, match="requires at least two periods; pass --steps 8"):
        plan_cases(request("local-sgd:4"))
    with pytest.raises(UsageError, match="not in bfloat16; remove --dtype"):
        plan_cases(request("quantized:8", dtype="bfloat16"))
    with pytest.raises(UsageError, match="exact only checks exact sums"):
        plan_cases(request("quantized:8", workloads=("exact",)))


def test_cases_owe_what_there_is_to_owe() -> None:
    plans = {
        accept: [(c.workload, c.dtype, c.layers) for c in plan_cases(request(accept, steps=4))]
        for accept in ("low-precision:bf16", "quantized:8", "low-rank:2", "local-sgd:2")
    }
    own = ("composite", "float32", ("bitwise", "rounding"))
    full = [
        ("cnn", "float32", ("bitwise", "rounding", "full batch float32")),
        own,
        ("composite", "float64", ("full batch float64",)),
    ]
    assert plans["low-precision:bf16"] == [("exact", "float32", ("exact",)), *full]
    assert plans["quantized:8"] == full
    assert plans["low-rank:2"] == [("cnn", "float32", ("bitwise", "rounding"))]
    assert plans["local-sgd:2"] == [("cnn", "float32", ("bitwise", "rounding")), own]


def shards_of(seed: int, world: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(shape, generator=generator) ** 4  # most elements are small
    return [torch.randn(shape, generator=generator) * scales for _ in range(world)]


def quantize(gradient: torch.Tensor, bits: int, *, symmetric: bool) -> torch.Tensor:
    """To a grid and back, in float32."""
    if symmetric:
        quantum = gradient.abs().max() / (2 ** (bits - 1) - 1)
        return (gradient / quantum).round() * quantum
    least, most = gradient.min().clamp(max=0), gradient.max().clamp(min=0)
    quantum = (most - least) / (2**bits - 1)
    zero = (-least / quantum).round()
    return ((gradient / quantum).round() + zero).clamp(0, 2**bits - 1).sub(zero) * quantum


@given(
    seed=st.integers(0, 10_000), world=st.integers(1, 8), bits=st.integers(2, 16),
    symmetric=st.booleans(),
)  # fmt: skip
def test_quantized_means_within_bound(seed: int, world: int, bits: int, symmetric: bool) -> None:
    shards, weights = shards_of(seed, world, (300,)), [1 / world] * world
    halves = [quantum.half_quanta([shard], bits)[0] for shard in shards]
    known = quantum.quantized_interval(interval(shards, weights), halves, weights, torch.float32)
    sent = [quantize(shard, bits, symmetric=symmetric) for shard in shards]
    error = (sum(sent).double() / world - known.mean).abs()
    assert bool((error <= known.bound).all())


@given(
    seed=st.integers(0, 10_000), sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    bits=st.integers(2, 12), weighted_first=st.booleans(),
)  # fmt: skip
def test_sums_of_whole_numbers_on_one_grid_are_within_the_bound(
    seed: int, sizes: list[int], bits: int, weighted_first: bool
) -> None:
    """The grid spans the widest rank's range; ranks' ranges differ by some tens of percent."""
    world, weights = len(sizes), [size / sum(sizes) for size in sizes]
    shards = [s * (1 + 0.2 * r) for r, s in enumerate(shards_of(seed, world, (300,)))]
    halves = [quantum.half_quanta([shard], bits)[0] for shard in shards]
    known = quantum.quantized_interval(interval(shards, weights), halves, weights, torch.float32)
    shares = [w * world if weighted_first else 1.0 for w in weights]
    sent = [shard * share for shard, share in zip(shards, shares, strict=True)]
    grid = max(float(s.abs().max()) for s in sent) / (2 ** (bits - 1) - 1)
    whole = [
        (s / grid).round() * w / share for s, share, w in zip(sent, shares, weights, strict=True)
    ]
    error = (sum(whole).double() * grid - known.mean).abs()
    assert bool((error <= known.bound).all())


def test_a_coarser_grid_for_all_is_outside() -> None:
    shards, weights = shards_of(1, 4, (1000,)), [0.25] * 4
    halves = [quantum.half_quanta([shard], 8)[0] for shard in shards]
    known = quantum.quantized_interval(interval(shards, weights), halves, weights, torch.float32)
    for bits, inside in ((8, True), (6, False)):
        grid = max(float(s.abs().max()) for s in shards) / (2 ** (bits - 1) - 1)
        mean = sum((shard / grid).round() * grid for shard in shards).double() / 4
        assert bool(((mean - known.mean).abs() <= known.bound).all()) == inside


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_has_no_grid(bad: float) -> None:
    for place in (0, 1):
        gradients = [torch.ones(2), torch.ones(2)]
        gradients[place][1] = bad
        with pytest.raises(NotBoundedError, match="has no bound"):
            quantum.half_quanta(gradients, 8)


def test_an_infinite_mean_is_owed_as_such_to_whoever_quantizes() -> None:
    shards, weights = [torch.tensor([math.inf, 1.0]), torch.ones(2)], [0.5, 0.5]
    known = quantum.quantized_interval(
        interval(shards, weights), [torch.tensor(0.1)] * 2, weights, torch.float32
    )
    assert (float(known.bound[0]), float(known.bound[1]) > 0.1) == (0.0, True)


def test_a_coarser_grid_is_outside() -> None:
    shards, weights = shards_of(1, 2, (1000,)), [0.5, 0.5]
    halves = [quantum.half_quanta([shard], 8)[0] for shard in shards]
    known = quantum.quantized_interval(interval(shards, weights), halves, weights, torch.float32)
    for bits, inside in ((8, True), (7, False)):
        mean = sum(quantize(shard, bits, symmetric=True) for shard in shards).double() / 2
        assert bool(((mean - known.mean).abs() <= known.bound).all()) == inside


def exchange(shards: list[torch.Tensor], rank: int, seed: int) -> torch.Tensor:
    """P Q^T in float32, from random directions, as ranks would."""
    generator = torch.Generator().manual_seed(seed)
    tried = torch.randn(shards[0].shape[1], rank, generator=generator)
    basis = torch.linalg.qr(sum(shard @ tried for shard in shards)).Q
    return basis @ (sum(shard.T @ basis for shard in shards) / len(shards)).T


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000), world=st.integers(1, 6), rows=st.integers(3, 60),
    columns=st.integers(3, 60), rank=st.integers(1, 2),
)  # fmt: skip
def test_projections_bound(seed: int, world: int, rows: int, columns: int, rank: int) -> None:
    left = [torch.zeros(rows, columns) for _ in range(world)]
    earlier = []
    for step in range(3):
        shards = shards_of(seed + 20_000 * step, world, (rows, columns))
        given_in = [g + e for g, e in zip(shards, left, strict=True)]
        if step == 1 or seed % 2:  # from the right
            sent = exchange([part.T for part in given_in], rank, seed + step).T
        else:
            sent = exchange(given_in, rank, seed + step)
        now = interval(shards, [1 / world] * world)
        known = low_rank.compression_input(now, earlier, rank=rank, world=world, unit=U)
        for factor, right in ((1.0, True), (1.01, False), (float(world + 1), False)):
            found = known.fit(sent * factor)
            assert (not found.why) == right, (step, factor, found)
        earlier.append((now, sent))
        left = [a - sent for a in given_in]


def test_what_is_no_projection_is_said() -> None:
    shards = shards_of(1, 4, (20, 30))
    now = interval(shards, [0.25] * 4)
    known = low_rank.compression_input(now, [], rank=2, world=4, unit=U)

    def why(result: torch.Tensor, rank: int = 2) -> str:
        return replace(known, rank=rank).fit(result).why

    sent = exchange(shards, 2, 0)
    assert not why(sent)
    assert not why(sent, rank=3)  # fewer directions than may be
    assert not why(sum(shards) / 4)  # not compressed at all
    assert why(sent, rank=1) == "not the mean, and of rank 2 instead of 1"
    assert why(torch.zeros(20, 30)) == "zero, but the mean is not"
    assert why(torch.full((20, 30), float("nan"))) == "not the mean"
    assert "(2 times one)" in why(sent * 2)
    assert "not a projection" in why(exchange(shards[:3], 2, 0))
    turned = [shard.T for shard in shards]
    assert not why(exchange(turned, 2, 0).T)
    assert why(exchange(turned, 2, 0).T, rank=1) == "not the mean, and of rank 2 instead of 1"
    assert "not a projection" in why(exchange(turned[:3], 2, 0).T)
    assert "not a projection" in why(exchange(turned, 2, 0).T * 1.01)
    ones = interval([torch.ones(9)] * 2, [0.5] * 2)
    vector = low_rank.compression_input(ones, [], rank=2, world=2, unit=U)
    assert vector.fit(torch.full((9,), 2.0)).why


@pytest.mark.parametrize("left", [torch.zeros(20, 30), *shards_of(1, 1, (20, 30))])
def test_where_the_mean_is_zero_so_is_what_was_exchanged(left: torch.Tensor) -> None:
    """Because every rank's gradient is, or because two of them cancel."""
    zero = interval([left, -left], [0.5] * 2)
    known = low_rank.compression_input(zero, [], rank=2, world=2, unit=U)

    def why(result: torch.Tensor) -> str:
        return known.fit(result).why

    assert not why(torch.zeros(20, 30))
    for wrong in (torch.ones(20, 30), torch.randn(20, 30)):  # of rank 1, and of more than was said
        assert why(wrong) == "nonzero, but the mean is zero"
    rounded = torch.zeros(20, 30)  # one element has got the roundings of two matrix products
    rounded[3, 4] = 4 * float(known.bound.max())
    assert not why(rounded)
