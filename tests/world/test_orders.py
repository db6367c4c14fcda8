"""The predicted reduction orders are gloo's and DDP's own, to the bit."""

from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import distcheck
from distcheck.backends.gloo import all_reduce_sum, reduce_sum
from distcheck.contract import BackendAllReduce, BackendReduce, DDPBuckets
from distcheck.testing import WorldView
from distcheck.training.jobs import CalibrationResult
from distcheck.verification import preparation
from distcheck.verification.preparation import calibrate
from distcheck.worlds.pool import Pool

SMALL = "tests.mutants.small:Small"
SIZES = st.one_of(
    st.integers(1, 40),
    st.integers(1, 5000),
    st.sampled_from([2**18 - 1, 2**18, 2**18 + 1, 2**19 + 3, 1_000_003]),
)
DTYPES = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
ORDERS = (
    BackendAllReduce(), BackendReduce(), DDPBuckets(), DDPBuckets(first_mib=0.5, cap_mib=0.5),
    DDPBuckets(rebuilt_at=None), DDPBuckets(rebuilt_at=2),
)  # fmt: skip
EXAMPLES = st.lists(
    st.tuples(SIZES, DTYPES, st.integers(0, 1000), st.sampled_from(["plain", "spread"])),
    min_size=1,
    max_size=8,
)


@pytest.mark.world([2, 3, 5], reuse=True)
@settings(max_examples=6)
@given(examples=EXAMPLES)
def test_all_reduce_orders(world: WorldView, examples: list[tuple[int, str, int, str]]) -> None:
    for elements, dtype, seed, how in examples:
        assert_as_predicted(world, elements, getattr(torch, dtype), seed, how)


@pytest.mark.sweep
@pytest.mark.world([4, 6, 7, 16], reuse=True)
@settings(max_examples=20)
@given(examples=EXAMPLES)
def test_other_world_sizes(world: WorldView, examples: list[tuple[int, str, int, str]]) -> None:
    for elements, dtype, seed, how in examples:
        assert_as_predicted(world, elements, getattr(torch, dtype), seed, how)


@pytest.mark.world([2, 3], reuse=True)
def test_many_segments(world: WorldView) -> None:
    """More than 2 W MiB: the ring has more segments than its least number."""
    assert_as_predicted(world, 2_400_000, torch.float32, 1, "plain")
    assert_as_predicted(world, 5_000_001, torch.bfloat16, 2, "spread")


def assert_as_predicted(
    world: WorldView, elements: int, dtype: torch.dtype, seed: int, how: str
) -> None:
    vectors = [vector(elements, dtype, seed * 1000 + rank, how) for rank in range(world.size)]
    reduced = vectors[world.rank].clone()
    dist.all_reduce(reduced)
    assert torch.equal(reduced, all_reduce_sum(vectors)), (elements, dtype, seed)

    reduced, root = vectors[world.rank].clone(), seed % world.size
    dist.reduce(reduced, dst=root)
    if world.rank == root:
        assert torch.equal(reduced, reduce_sum(vectors)), (elements, dtype, seed)


def vector(elements: int, dtype: torch.dtype, seed: int, how: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator, dtype=torch.float64)
    if how == "spread":
        values *= torch.pow(2.0, torch.randint(-6, 7, (elements,), generator=generator))
    return values.to(dtype)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_calibration_confirms_the_ring_and_ddps_buckets(pool: Pool, world: int) -> None:
    found = calibrate(
        pool, backend="gloo", world=world, orders=ORDERS, dtypes=("float32", "float64"),
        deadline_s=30.0,
    )  # fmt: skip
    assert found.failures == tuple((order, "") for order in ORDERS)


def test_orders_are_confirmed_once_in_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(pool: Pool, **about: Any) -> CalibrationResult:
        asked.append((about["world"], about["dtypes"]))
        return calibrate(pool, **about)

    def judged() -> set[str]:
        report = distcheck.verify("allreduce", world=2, workload=SMALL, dtype="float32", steps=1)
        assert report.verdict == "pass"
        return {r.layer for r in report.cases[0].checks if r.check == "gradients"}

    monkeypatch.setattr(preparation, "calibrate", counted)
    monkeypatch.setenv("OF_THIS_TEST", str(uuid4()))
    assert judged() == judged() == {"bitwise", "rounding", "full batch float32"}
    assert asked == [(2, ("float32",))]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another one")
    judged()
    assert len(asked) == 1
    monkeypatch.setenv("OF_THIS_TEST", str(uuid4()))  # gloo's own settings, say
    judged()
    assert len(asked) == 2


def test_orders_that_did_not_hold_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuted(pool: Pool, **about: Any) -> CalibrationResult:
        asked.append(about["world"])
        return CalibrationResult(
            failures=tuple((order, "it did not hold") for order in about["orders"])
        )

    monkeypatch.setattr(preparation, "calibrate", refuted)
    monkeypatch.setenv("OF_THIS_TEST", str(uuid4()))
    for _ in range(2):
        report = distcheck.verify("allreduce", world=2, workload=SMALL, dtype="float32", steps=1)
        layers = {r.layer for r in report.cases[0].checks if r.check == "gradients"}
        assert layers == {"rounding", "full batch float32"}
    assert asked == [2, 2]
