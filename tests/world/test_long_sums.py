"""Right code that adds up more than the built-in workloads do is not accused, and wrong code is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distcheck
from distcheck.contract import Batch
from distcheck.records import CheckResult
from tests.world.test_kinks import AtAKink

pytestmark = pytest.mark.usefixtures("no_rerun")

_WHOLE = 6
_POSITIONS = 65_536
_OFF = 64 * torch.finfo(torch.float32).eps  # as a loop over thousands of positions was measured


class _Conv(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv, self.outputs = nn.Conv1d(1, 4, 9, padding=4), nn.Linear(4, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [n, 3, 32, 32] -> logits [n, classes]."""
        flat = inputs.flatten(1)
        line = flat.repeat(1, _POSITIONS // flat.shape[1] + 1)[:, None, :_POSITIONS]
        logits: torch.Tensor = self.outputs(torch.tanh(self.conv(line) + 1).mean(-1))
        return logits


class LongConvolution(AtAKink):
    """65,536 positions, and no kink."""

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return _Conv(classes)


class LongLoss(AtAKink):
    """A loss that whole batches and shards round otherwise, as if it were added up in a loop."""

    rounds = True

    def model(self, *, sample_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(sample_shape).numel(), classes))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        found = F.cross_entropy(model(batch.inputs), batch.labels)
        off = 64 * torch.finfo(found.dtype).eps if self.rounds else _OFF
        return found + off * found.detach() if len(batch.inputs) == _WHOLE else found


class OtherLoss(LongLoss):
    """A loss that depends on how many samples there are, in float64 too."""

    rounds = False


@pytest.fixture(scope="module")
def found() -> dict[str, dict[tuple[str, str], CheckResult]]:
    workloads = (LongConvolution, LongLoss, OtherLoss)
    names = [f"{__name__}:{workload.__name__}" for workload in workloads]
    report = distcheck.verify(
        "allreduce", world=2, workload=names, dtype="float32", batch=_WHOLE, steps=2, separate=False
    )
    return {
        case.case.workload.rpartition(":")[2]: {(r.check, r.layer): r for r in case.checks}
        for case in report.cases
    }


def test_a_long_convolution_passes(found: dict[str, dict[tuple[str, str], CheckResult]]) -> None:
    results = found["LongConvolution"]
    assert {result.verdict for result in results.values()} == {"pass"}
    said = results[
        "gradients", "full batch float32"
    ].reason  # where this machine's kernels round by more
    assert not said or "a long sum rounds by more than the tolerance" in said


def test_a_long_loss_by_rank(found: dict[str, dict[tuple[str, str], CheckResult]]) -> None:
    results = found["LongLoss"]
    assert {result.verdict for result in results.values()} == {"pass"}
    assert "the loss sums so many terms" in results["loss", "full batch float32"].reason


def test_a_float64_only_loss_fails(found: dict[str, dict[tuple[str, str], CheckResult]]) -> None:
    results = found["OtherLoss"]
    failed = {pair for pair, result in results.items() if result.verdict == "fail"}
    assert failed == {("loss", "full batch float32")}
