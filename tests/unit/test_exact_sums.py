"""Workload `exact` in closed form agrees with autograd, and knows where bits are not required."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.contract import Batch, Contract
from distcheck.judge.oracles.integers import (
    HeadroomError,
    IntegerOracle,
    expand_parameter,
    initial_weights,
    integer_value,
    reciprocal_is_exact,
    why_not_exact,
)
from distcheck.workloads.exact import IntegerSamples, small_integers, workload

AFTER = Contract(scale="divide-after")


def ranks(shards: list[list[int]], steps: int) -> tuple[dict[str, torch.Tensor], IntegerOracle]:
    """Trains in one process: shards apart, gradients weighted, added in rank order."""
    samples, total = IntegerSamples(), sum(map(len, shards))
    model = workload.model(sample_shape=samples.shape, classes=1)
    optimizer = workload.optimizer(model.parameters())
    for step in range(steps):
        sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for ids in shards:
            batch_ids = torch.tensor(ids) + 1000 * step
            inputs, labels = samples.read(batch_ids, train=True, dtype=torch.float32)
            model.zero_grad()
            batch = Batch(inputs=inputs, labels=labels, ids=batch_ids, total=total)
            workload.loss(model, batch).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad * (len(ids) * len(shards) / total)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / len(shards)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, IntegerOracle(
        AFTER, "float32"
    )


@pytest.mark.parametrize(
    "sizes", [[256], [64] * 4, [86, 85, 85], [52, 51, 51, 51, 51], [128, 128]], ids=str
)
def test_closed_form_equals_autograd_to_the_bit(sizes: list[int]) -> None:
    bounds = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    shards = [list(range(a, b)) for a, b in pairwise(bounds)]
    actual, oracle = ranks(shards, steps=3)
    for step in range(3):
        expected = oracle.step([[i + 1000 * step for i in ids] for ids in shards])
    for name, parameter in actual.items():
        values = torch.tensor(expand_parameter(name, expected.after[name]), dtype=torch.float32)
        assert torch.equal(parameter.flatten(), values), name


def test_most_gradients_are_not_zero() -> None:
    oracle = IntegerOracle(AFTER, "float32")
    for step in range(3):
        expected = oracle.step([list(range(256 * step, 256 * (step + 1)))])
        for name, values in expected.synced.items():
            share = sum(v != 0 for v in values) / len(values)
            assert share > 0.5, (name, step)


@given(row=st.integers(0, 10**6), column=st.integers(0, 100), span=st.sampled_from([3, 5, 7]))
def test_both_sides_agree_on_the_data(row: int, column: int, span: int) -> None:
    assert int(small_integers(torch.tensor(row), torch.tensor(column), span)) == integer_value(
        row, column, span
    )


def test_initial_weights_agree() -> None:
    model = workload.model(sample_shape=(1,), classes=1)
    for name, parameter in model.named_parameters():
        values = expand_parameter(name, [Fraction(v) for v in initial_weights()[name]])
        assert torch.equal(parameter.detach().flatten().double(), torch.tensor(values))


@given(world=st.integers(1, 300), bits=st.sampled_from(["float32", "float64"]))
def test_reciprocal_claim_holds_where_it_is_made(world: int, bits: str) -> None:
    if not reciprocal_is_exact(world, bits):
        return
    dtype = getattr(torch, bits)
    integers = torch.arange(1, 5000, dtype=dtype)
    assert torch.equal((integers * world) * torch.tensor(1.0 / world, dtype=dtype), integers)


def test_seven_is_the_first_world_without_an_exact_reciprocal() -> None:
    assert [w for w in range(1, 12) if not reciprocal_is_exact(w, "float32")] == [7]
    sevenths = torch.tensor([49.0]) * torch.tensor(1 / 7)
    assert float(sevenths) != 7.0


def test_where_bits_are_not_owed() -> None:
    even, uneven = [[64] * 4], [[86, 85, 85]]
    before = Contract(scale="multiply-before")
    assert why_not_exact(AFTER, dtype="float32", world=4, shard_sizes=even) == ""
    assert why_not_exact(before, dtype="float32", world=3, shard_sizes=uneven) == ""
    assert "1/7" in why_not_exact(before, dtype="float32", world=7, shard_sizes=[[32] * 7])
    assert "1/7" in why_not_exact(Contract(), dtype="float32", world=7, shard_sizes=[[32] * 7])
    assert why_not_exact(AFTER, dtype="float32", world=7, shard_sizes=[[32] * 7]) == ""
    assert "100 samples" in why_not_exact(
        AFTER, dtype="float32", world=3, shard_sizes=[[34, 33, 33]]
    )
    assert "too low" in why_not_exact(AFTER, dtype="bfloat16", world=4, shard_sizes=even)


def test_sums_too_large_to_be_exact_are_told_beforehand() -> None:
    assert why_not_exact(AFTER, dtype="float32", world=4, shard_sizes=[[250] * 4]) == ""
    assert "too large" in why_not_exact(AFTER, dtype="float32", world=4, shard_sizes=[[775] * 4])
    assert why_not_exact(AFTER, dtype="float64", world=4, shard_sizes=[[775] * 4]) == ""
    long_run = [[86, 85, 85]] * 100
    assert "too large" in why_not_exact(AFTER, dtype="float32", world=3, shard_sizes=long_run)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_times_no_number_has_no_exact_gradients(factor: float) -> None:
    with pytest.raises(HeadroomError, match="number that is not finite"):
        IntegerOracle(Contract(), "float32").step([[0, 1], [2, 3]], [1.0, factor])


def test_headroom_is_asserted() -> None:
    oracle = IntegerOracle(AFTER, "float32")
    oracle._limit = 2**12
    with pytest.raises(HeadroomError, match="may reach"):
        oracle.step([list(range(256))])
