"""Compressors with a memory: right ones fit for every seed and world, wrong ones do not."""

from collections.abc import Callable, Sequence

import pytest
import torch

from distcheck.judge.oracles import quantum
from distcheck.judge.oracles.compression import (
    Compressor,
    SparseSum,
    allowed_counts,
    check_counts,
    find_compressor,
    round_fractions,
)
from distcheck.judge.oracles.rounding import interval
from distcheck.machine.numerics import smallest, unit_roundoff

DTYPE = {"unit": unit_roundoff("float32"), "tiny": smallest("float32")}
SHAPES = ((40, 30), (30,), (30, 10), (10,))
Compress = Callable[[torch.Tensor, int, int], torch.Tensor]  # of a vector, at a step, on a rank
Rest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def only(total: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    sent = torch.zeros_like(total)
    sent[places] = total[places]
    return sent


def top(amount: float) -> Compress:
    def compress(total: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        k = min(len(total), int(amount)) if amount >= 1 else max(1, int(amount * len(total)))
        return only(total, total.abs().topk(k).indices)

    return compress


def drawn(fraction: float, *, shared: bool) -> Compress:
    def compress(total: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed(step + 1000 * rank * (not shared))
        order = torch.randperm(len(total), generator=seed)
        return only(total, order[: max(1, int(fraction * len(total)))])

    return compress


def signs(total: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    return total.abs().mean() * total.sign()


def packed_signs(total: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """One bit each: zero is positive."""
    return total.norm() / len(total) ** 0.5 * torch.where(total < 0, -1.0, 1.0)


def train(
    compress: Compress,
    *,
    world: int,
    seed: int = 0,
    steps: int = 3,
    whole: bool = False,
    rest: Rest = torch.sub,
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Contributions and results of every step, in float32, as ranks would."""
    generator = torch.Generator().manual_seed(seed)
    memory = dict[tuple[int, int], torch.Tensor]()
    given, results = [], []
    for step in range(steps):
        gradients = [
            [
                torch.randn(shape, generator=generator).relu()  # many zeros
                * torch.randn(shape, generator=generator)
                for shape in SHAPES
            ]
            for _ in range(world)
        ]
        given.append(
            [
                torch.stack([of_rank[index].double().flatten() / world for of_rank in gradients])
                for index in range(len(SHAPES))
            ]
        )
        flat = [[g.flatten() for g in of_rank] for of_rank in gradients]
        flat = [[torch.cat(of_rank)] for of_rank in flat] if whole else flat
        sums = []
        for index in range(len(flat[0])):
            total = torch.zeros_like(flat[0][index])
            for rank in range(world):
                mine = flat[rank][index] + memory.get((rank, index), 0.0)
                sent = compress(mine, step, rank)
                memory[rank, index] = rest(mine, sent)
                total = total + sent
            sums.append(total / world)
        if whole:
            sums = list(sums[0].split([given[0][i].shape[1] for i in range(len(SHAPES))]))
        results.append([y.reshape(shape) for y, shape in zip(sums, SHAPES, strict=True)])
    return given, results


def first_misfit(
    compressor: Compressor,
    given: Sequence[Sequence[torch.Tensor]],
    results: Sequence[Sequence[torch.Tensor]],
) -> str:
    """The step of the first result that does not fit, and why; empty if all fit."""
    memories: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step, (parts, sums) in enumerate(zip(given, results, strict=True)):
        forms = compressor.inputs(parts, memories, SHAPES, **DTYPE)
        for form, y in zip(forms, sums, strict=True):
            if why := form.fit(y).why:
                return f"{step}: {why}"
        if compressor.whole and compressor.amount and (why := check_counts(forms, sums)):
            return f"{step}: {why}"
        memories = [form.memory(y) for form, y in zip(forms, sums, strict=True)]
    return ""


RIGHT: list[tuple[Compressor, Compress, bool]] = [
    (Compressor(20), top(20), False),
    (Compressor(0.05), top(0.05), False),
    (Compressor(0.05, whole=True), top(0.05), True),
    (Compressor(0.05, top=False), drawn(0.05, shared=True), False),
    (Compressor(0.05, top=False), drawn(0.05, shared=False), False),
    (Compressor(), signs, False),
    (Compressor(), packed_signs, False),
    (Compressor(whole=True), signs, True),
]


@pytest.mark.parametrize(("accepted", "compress", "whole"), RIGHT)
def test_right_compressors_fit_and_are_found(
    accepted: Compressor, compress: Compress, whole: bool
) -> None:
    given, results = train(compress, world=3, whole=whole)
    assert not first_misfit(accepted, given, results)
    assert find_compressor(given[0], results[0], SHAPES, **DTYPE) == accepted


@pytest.mark.sweep
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", range(10))
def test_right_compressors_fit_for_every_seed(seed: int, world: int) -> None:
    for accepted, compress, whole in RIGHT:
        given, results = train(compress, world=world, seed=seed, steps=6, whole=whole)
        assert not first_misfit(accepted, given, results)


@pytest.mark.parametrize(
    ("accepted", "compress", "rest", "why"),
    [
        (Compressor(0.05), top(0.05), lambda a, sent: sent - sent, "1: not a sum of ranks'"),
        (Compressor(0.05), top(0.05), lambda a, sent: (a - sent) / 2, "1: not a sum of ranks'"),
        (Compressor(0.05), top(0.05), lambda a, sent: a + sent, "1: not a sum of ranks'"),
        (Compressor(0.05), top(0.06), torch.sub, "0: 72 elements of rank 0 instead of 59 to 61"),
        (Compressor(19), top(20), torch.sub, "0: 20 elements of rank 0 instead of 19"),
        (Compressor(21), top(20), torch.sub, "0: 20 elements of rank 0 instead of 21"),
        (
            Compressor(20),
            drawn(0.05, shared=True),
            torch.sub,
            "0: 32 elements of rank 0 instead of 20",
        ),
        (
            Compressor(0.05),
            lambda a, step, rank: only(a, a.topk(len(a) // 20).indices),
            torch.sub,
            "0: not the largest elements of rank 0",
        ),
        (Compressor(), signs, lambda a, sent: sent - sent, "1: not the signs of ranks'"),
        (Compressor(), signs, lambda a, sent: a - sent.sign(), "1: not the signs of ranks'"),
        (Compressor(), lambda *a: 1.1 * signs(*a), torch.sub, "0: not the signs of ranks'"),
    ],
)
def test_wrong_ones_do_not_fit(
    accepted: Compressor, compress: Compress, rest: Rest, why: str
) -> None:
    given, results = train(compress, world=3, rest=rest)
    assert first_misfit(accepted, given, results).startswith(why)


def test_what_is_counted_over_all_tensors() -> None:
    given, results = train(top(0.06), world=2, whole=True)
    random = Compressor(0.05, top=False, whole=True)
    assert "in all tensors instead of 76 to 78" in first_misfit(random, given, results)


def test_elements_of_a_result_that_no_rank_sent() -> None:
    (form,) = Compressor(1, top=False).inputs([torch.ones(2, 4).double()], (), [(4,)], **DTYPE)
    assert isinstance(form, SparseSum)
    assert not form.fit(torch.tensor([2.0, 0.0, 0.0, 0.0])).why
    assert form.fit(torch.tensor([2.0, 2.0, 2.0, 2.0])).kept == 1.0  # complete: not compressed
    assert form.fit(torch.tensor([2.0, 2.0, 0.0, 0.0])).why == "2 elements of rank 0 instead of 1"
    assert form.fit(torch.tensor([0.5, 0.0, 0.0, 0.0])).why.startswith("not a sum of ranks'")


def test_numbers_that_an_amount_stands_for() -> None:
    assert allowed_counts(20, 1000) == (20, 20)
    assert allowed_counts(20, 4) == (4, 4)
    assert allowed_counts(0.01, 1000) == (9, 11)
    assert allowed_counts(0.01, 550) == (5, 6)
    assert allowed_counts(0.01, 3) == (1, 1)
    assert round_fractions([(12, 1200), (3, 300)], exact=True) == [0.01]
    assert round_fractions([(11, 1200), (1, 300)], exact=False) == [0.01]


def draw(
    rounded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, seed: int, block: int = 64
) -> tuple[float, float]:
    """The largest share of a bound that an element, and a sum of errors, has: 8 bits, world 2."""
    generator = torch.Generator().manual_seed(seed)
    shards = [torch.randn(4096, generator=generator) for _ in range(2)]
    total = torch.zeros(4096)
    for shard in shards:
        step = quantum.grid_range(shard, block=block) / 127
        levels = rounded(shard / step, torch.rand(4096, generator=generator))
        total += levels * step / 2
    known = interval(shards, [0.5, 0.5])
    halves = [quantum.half_quanta([s], 8, block=64, stochastic=True)[0] for s in shards]
    within = quantum.quantized_interval(known, halves, [0.5, 0.5], torch.float32)
    errors = quantum.Unbiased(
        mean=within.mean,
        suspects=quantum.biased_roundings(shards, [0.5, 0.5], 8, 64),
        width=(halves[0] + halves[1]) / 2,
        rounding=known.bound,
        probability=1e-12,
    )
    error, bound = errors.worst_sum(total)
    return float(((total - within.mean).abs() / within.bound).max()), error / bound


def test_stochastic_rounding_is_unbiased() -> None:
    for seed in range(20):
        element, errors = draw(lambda x, u: (x + u).floor(), seed=seed)
        assert element <= 1
        assert errors <= 0.5
    for biased in (
        lambda x, u: x.round(), lambda x, u: x.floor(), lambda x, u: x.trunc(),
        lambda x, u: (x + u / 2).floor(),
    ):  # fmt: skip
        element, errors = draw(biased, seed=1)
        assert element <= 1
        assert errors > 1
    assert draw(lambda x, u: (x + u).floor(), seed=1, block=4096)[0] > 1  # one grid, not of blocks
    assert draw(lambda x, u: (x + 2 * u).floor(), seed=1)[0] > 1
