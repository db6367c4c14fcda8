"""Ranks that count by tokens, in worlds of real ranks."""

import subprocess

import pytest
import torch
from torch import nn

import distcheck
from distcheck.records import Report
from distcheck.workloads.tokens import IGNORED, LENGTH, VOCABULARY, Sequences, Workload
from tests.world.command import COMMAND, ROOT
from tests.world.test_verify import assert_everything_compared


class FourTargets(Sequences):
    """Sequences of one length."""

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = super().read(ids, train=train, dtype=dtype)
        targets = inputs.long().where(torch.arange(LENGTH) < 4, IGNORED)
        return inputs, targets


class FewSequences(Sequences):
    """Every target is token 5."""

    def size(self, *, train: bool) -> int:
        return 16 if train else 12

    def read(
        self, ids: torch.Tensor, *, train: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = super().read(ids, train=train, dtype=dtype)
        return inputs, targets.where(targets == IGNORED, 5)


class SaysFive(nn.Module):
    """Right wherever there is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.eye(VOCABULARY)[5])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*inputs.shape, VOCABULARY)


class Fives(Workload):
    """Twelve sequences to test with, in batches of five."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return SaysFive()

    def samples(self) -> Sequences:
        return FewSequences()


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
    assert all("equally many on every rank, at every step" in said for said in reasons)


def test_accuracy_is_that_of_tokens_without_padding() -> None:
    """Padding that counted would be wrong, or more answers than there are targets."""
    _, targets = FewSequences().read(torch.arange(12), train=False, dtype=torch.float32)
    words = ["train", "--workload", f"{__file__}:Fives", "--batch", "5", "--steps", "1"]
    ran = subprocess.run([*COMMAND, *words], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    real = int((targets != IGNORED).sum())
    assert 0 < real < targets.numel()
    assert f"accuracy 100.00% on {real} test samples," in ran.stdout


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "causes"),
    [
        ("ByTokens", set()),
        ("CountsPerTensorRank", {"double-division", "extra-division"}),
        ("CountsAlike", {"unweighted-tokens"}),
    ],
)
def test_tokens_in_a_mesh_count_once_for_each_data_coordinate(name: str, causes: set[str]) -> None:
    report = distcheck.verify(
        f"tests.unusual.tokens_in_a_mesh:{name}", world=4, workload="tokens", batch=48,
        dtype="float32", separate=False,
    )  # fmt: skip
    assert {found.cause for case in report.cases for found in case.diagnosis} == causes
    assert report.verdict == ("fail" if causes else "pass")
