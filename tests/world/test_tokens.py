"""Ranks that count by tokens, in worlds of real ranks."""

import pytest
import torch

import distcheck
from distcheck.records import Report
from distcheck.workloads.tokens import IGNORED, LENGTH, Sequences, Workload
from tests.world.test_verify import assert_everything_compared


class FourTargets(Sequences):
    """Sequences of one length."""

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = super().read(ids, train=train, dtype=dtype)
        targets = inputs.long().where(torch.arange(LENGTH) < 4, IGNORED)
        return inputs, targets


class AsLong(Workload):
    """Every rank has as many tokens, so a mean of the ranks' means is right."""

    def samples(self) -> Sequences:
        return FourTargets()


def failed(report: Report) -> set[tuple[str, str]]:
    checks = [result for case in report.cases for result in case.checks]
    return {(result.check, result.layer) for result in checks if result.verdict == "fail"}


@pytest.mark.usefixtures("no_rerun")
def test_a_rank_without_a_token_takes_part() -> None:
    """One sequence on each rank: at the first two steps rank 0 has none, at the third rank 1."""
    report = distcheck.verify(
        "token_weighted", world=2, workload="tokens", batch=2, seed=2, dtype="float64"
    )
    (case,) = report.cases
    assert failed(report) == set(), case
    assert {r.check for r in case.checks if r.verdict == "unknown"} <= {"sensitivity"}


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("batch", [47, 256])
def test_token_weighted_is_right(world: int, batch: int) -> None:
    report = distcheck.verify("token_weighted", world=world, workload="tokens", batch=batch)
    assert_everything_compared(report)


@pytest.mark.sweep
def test_as_many_tokens_on_every_rank_are_unknown() -> None:
    report = distcheck.verify(
        "token_weighted", world=2, workload="tests.world.test_tokens:AsLong", batch=24
    )
    reasons = [r.reason for c in report.cases for r in c.checks if r.verdict == "unknown"]
    assert reasons
    assert all("as many on every rank, at every step" in said for said in reasons)
