"""A failure that another loss contract would explain says so; no other failure does."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import distcheck
from distcheck.records import CaseReport

pytestmark = pytest.mark.usefixtures("no_rerun")

WORKLOAD = "tests.mutants.small:Small"
CODE = f"{Path(__file__).parents[1] / 'adapted' / 'functions.py'}"


@dataclass(frozen=True)
class Seen:
    """Code, what is declared of its loss, and under what its failure would be a pass."""

    spec: str
    causes: set[str]
    right_under: str = ""
    loss: str = "mean"
    batch: int = 48

    def __str__(self) -> str:
        return f"{self.spec.rpartition(':')[2]} {self.loss} {self.batch}".replace(" ", "-")


BOTH = "--loss mean/world or --loss sum/global"
SEEN = [
    Seen(f"{CODE}:only_sums", {"missing-division"}, BOTH),
    # 16, 16 and 15 samples: a sum is right for the loss that carries the shard's share alone.
    Seen(
        f"{CODE}:only_sums",
        {"missing-division", "unweighted-mean"},
        "--loss sum/global",
        batch=47,
    ),
    Seen(f"{CODE}:only_sums", set(), loss="sum/global", batch=47),  # and so it is
    Seen(f"{CODE}:average_gradients", {"double-division"}, "--loss mean", loss="mean/world"),
    Seen(f"{CODE}:average_gradients", {"unweighted-mean"}, batch=47),
    Seen("tests.mutants.scale:wrong_divisor", {"wrong-divisor"}),
    Seen("tests.mutants.scale:one_parameter_twice", {"double-division"}),
    Seen("tests.mutants.missing_sync:last_parameter_left_out", {"partial-sync"}),
    Seen("tests.world.test_loss_contract:sums_at_first", {"missing-division"}),
    # It has a loss of its own, for which no other can be declared.
    Seen("tests.world.test_loss_contract:SumsAndPromises", {"missing-division"}),
]  # fmt: skip


def sums_at_first(model, step):  # type: ignore[no-untyped-def]
    """What another loss explains of the first step, it does not of the second."""
    import torch.distributed as dist

    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if step.index > 0:
            parameter.grad /= step.world_size


class SumsAndPromises:
    """Adds up only; the loss is weighted by a backward() of its own."""

    def backward(self, loss_of, batch, step):  # type: ignore[no-untyped-def]
        loss = loss_of(batch)
        loss.backward()
        return loss

    def sync(self, model, step):  # type: ignore[no-untyped-def]
        import torch.distributed as dist

        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@functools.cache
def in_one_run(loss: str, batch: int) -> dict[str, CaseReport]:
    """All that are called alike, in one run: it is looked at once."""
    specs = [seen.spec for seen in SEEN if (seen.loss, seen.batch) == (loss, batch)]
    report = distcheck.verify(
        specs, world=3, workload=WORKLOAD, dtype="float32", batch=batch, steps=2, loss=loss
    )
    return dict(zip(specs, report.cases, strict=True))


@pytest.mark.parametrize("seen", SEEN, ids=str)
def test_says_so_where_it_is_so(seen: Seen) -> None:
    case = in_one_run(seen.loss, seen.batch)[seen.spec]
    assert case.verdict == ("fail" if seen.causes else "pass")
    assert {found.cause for found in case.diagnosis} == seen.causes
    hints = [found for found in case.diagnosis if "--loss does not match" in found.evidence]
    assert len(hints) == bool(seen.right_under)
    for hint in hints:
        assert f"pass {seen.right_under}" in re.sub(r" \([^)]*\)", "", hint.suggestion)
    assert any("--loss" in found.suggestion for found in case.diagnosis) == bool(seen.right_under)
