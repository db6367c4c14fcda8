"""Correct code that has never heard of distcheck raises no alarm."""

import pytest

import distcheck
from tests.correct import FORMS


@pytest.mark.parametrize("form", FORMS)
def test_correct_code_without_a_promise_passes(form: str) -> None:
    """In float32; the sweep adds float64, worlds and seeds."""
    workloads = ["lattice", "mlp"]
    report = distcheck.verify(f"tests.correct:{form}", world=3, workload=workloads, dtype="float32")
    report.raise_for_verdict()


@pytest.mark.parametrize("form", ["flat_buffer", "AllReduceHook"])
def test_running_statistics_may_be_local_or_rank_0s(form: str) -> None:
    workload = "tests.mutants.workloads:Normalised"
    distcheck.verify(f"tests.correct:{form}", world=3, workload=workload).raise_for_verdict()


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(10))
def test_correct_code_passes_at_more_worlds_and_seeds(form: str, seed: int) -> None:
    distcheck.verify(f"tests.correct:{form}", world=[2, 3, 4, 5], seed=seed).raise_for_verdict()
