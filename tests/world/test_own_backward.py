"""Strategies with their own backward: micro-batches that are seen, and the cells of the loop."""

import pytest
import torch

import distcheck
from distcheck.contract import Batch, LossOf, Step
from distcheck.errors import UsageError
from distcheck.records import Adaptation
from distcheck.training.loading import load_strategy
from tests.world.command import ROOT
from tests.world.test_verify import assert_everything_compared

SMALL = "tests.mutants.small:Small"


class DividesByTheNumber:
    """As accelerate's `accumulate` and Fabric do: every mean loss over the number of them."""

    parts = 7

    def backward(self, loss_of: LossOf, batch: Batch, step: Step) -> torch.Tensor:
        total = torch.zeros(())
        for part in batch.split(self.parts):
            loss = loss_of(part) / self.parts
            loss.backward()
            total += loss.detach()
        return total

    def sync(self, model: torch.nn.Module, step: Step) -> None:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= step.world_size


def test_micro_batches_that_are_not_promised_are_seen() -> None:
    report = distcheck.verify(
        f"{__name__}:DividesByTheNumber", world=2, workload=["exact", SMALL], batch=224, steps=2,
        dtype="float32",
    )  # fmt: skip
    assert_everything_compared(report)
    reasons = [result.reason for case in report.cases for result in case.checks]
    assert [r for r in reasons if "@strategy(micro_batches=7) allows bitwise comparison" in r]
    assert [r for r in reasons if "not bit-identical to micro-batches" in r]


@pytest.mark.sweep
def test_the_loops_own_cells() -> None:
    """`ddp_no_sync` cuts in two what accumulation has cut in two, and meets a scaled loss."""
    cells = ["accumulation", "loss_scaling"]
    report = distcheck.verify("ddp_no_sync", world=2, workload=cells, dtype="float32")
    assert_everything_compared(report)
    assert [case.case.workload for case in report.cases] == cells


@pytest.mark.parametrize("gradients", ["owners", "every"])
def test_a_promise_of_gradients_that_does_not_exist(gradients: str) -> None:
    with pytest.raises(ValueError, match='gradients "every rank" or "owner"'):
        distcheck.strategy(gradients=gradients)  # type: ignore[arg-type]


class EveryRanksOwners:
    """Promises owners, and has every parameter in every rank's optimizer."""

    def sync(self, model: torch.nn.Module, step: Step) -> None:
        """Nothing is reached."""


distcheck.strategy(gradients="owner")(EveryRanksOwners)


def test_owners_that_are_several_are_refused() -> None:
    with pytest.raises(UsageError, match=r"exactly one rank; the numbers .*0\.weight \(2\)"):
        distcheck.verify(f"{__name__}:EveryRanksOwners", world=2, workload=SMALL, steps=1)


def test_the_loop_does_not_clip_pieces_that_it_cannot_put_together() -> None:
    """torch's function would take the norm of a rank's own pieces: no mistake of the code's."""
    loaded = load_strategy(
        str(ROOT / "examples/forms/fsdp_by_hand.py") + ":ShardedParameters",
        Adaptation(form="sharded-module"),
    )
    assert "clipping" in loaded.contract.declines
