"""Ranks without data: who computes, what is required of whom; and nothing right is called wrong."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distcheck
from distcheck.contract import Step
from distcheck.errors import UsageError
from distcheck.records import CheckResult, Compared, Report

FORMS = Path(__file__).parents[2] / "examples" / "forms" / "server_without_data.py"
SMALL = f"{Path(__file__).parents[1] / 'adapted' / 'small.py'}:Small"
RIGHT = (
    ("averaged_by_server", None, 0),
    ("stepped_by_server", "steps-inside", 0),
    ("handed_on", None, -1),
)


def all_reduced(model: torch.nn.Module, step: Step) -> None:
    """Ranks without data add zeros, and hold the mean like the others."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= step.weight
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.shards


def added_up(tensor: torch.Tensor) -> None:
    """The mean is left to distcheck, which knows how many ranks give something."""
    dist.all_reduce(tensor)


def found(report: Report, check: str, layer: str = "-") -> CheckResult:
    (case,) = report.cases
    return next(r for r in case.checks if (r.check, r.layer) == (check, layer))


def test_two_ranks_without_data_and_shards_of_unequal_size() -> None:
    report = distcheck.verify(
        all_reduced, world=4, workload=SMALL, batch=101, steps=2, dtype="float32",
        without_data=(0, 2),
    )  # fmt: skip
    report.raise_for_verdict()
    assert found(report, "data").compared == Compared(elements=202, ranks=2, steps=2)
    assert found(report, "outcome").compared.ranks == found(report, "rerun").compared.ranks == 4
    assert found(report, "local gradients", "bitwise").compared.ranks == 2
    assert (
        found(report, "gradients", "rounding").compared.ranks == 4
    )  # zeros became the mean: compared
    assert found(report, "parameters", "bitwise").compared.ranks == 2
    (case,) = report.cases
    assert "rank 0, 2 has no data" in " ".join(case.notes)
    assert "uneven shards (51 + 50)" in " ".join(case.notes)
    assert "--without-data 0 --without-data 2" in case.replay


def test_a_rank_that_only_hands_on_is_not_compared_and_said_not_to_be() -> None:
    report = distcheck.verify(
        f"{FORMS}:handed_on", world=3, workload=SMALL, steps=2, dtype="float64", without_data=[2]
    )
    report.raise_for_verdict()
    for check, layer in (
        ("gradients", "rounding"),
        ("gradients", "full batch float64"),
        ("agreement", "-"),
    ):
        assert found(report, check, layer).compared.ranks == 2
    assert "rank 2, without data, kept its gradients at zero" in found(report, "agreement").reason


def test_one_rank_with_data_owes_its_own_gradient() -> None:
    report = distcheck.verify(
        f"{FORMS}:averaged_by_server", world=2, workload=SMALL, steps=1, dtype="float32",
        without_data=(0,),
    )  # fmt: skip
    report.raise_for_verdict()
    assert "only one rank has data, so there is nothing to average" in " ".join(
        report.cases[0].notes
    )


def test_a_sum_is_divided_by_the_ranks_that_have_data() -> None:
    report = distcheck.verify(
        added_up, form="tensor-sum", world=3, workload=SMALL, steps=1, dtype="float32",
        without_data=(1,),
    )  # fmt: skip
    report.raise_for_verdict()


def without_the_last(model: torch.nn.Module, step: Step) -> None:
    """The last rank has data, and its gradient goes nowhere."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= float(step.rank < step.world_size - 1)
        dist.all_reduce(parameter.grad)
        parameter.grad /= step.shards - 1


def test_a_cause_names_the_rank_that_was_run() -> None:
    report = distcheck.verify(
        without_the_last, world=4, workload=SMALL, batch=96, steps=1, dtype="float32",
        without_data=(0,),
    )  # fmt: skip
    (cause,) = report.cases[0].diagnosis
    assert cause.cause == "dropped-rank"
    assert cause.evidence.endswith("(of ranks 1, 2, 3, which have data)")
    assert "excludes rank 3 from" in cause.suggestion
    assert "pass --without-data 3," in cause.suggestion


@pytest.mark.parametrize(
    ("strategy", "options", "words"),
    [
        ("allreduce", {}, "promises how every rank's gradient is synchronized"),
        ("ddp", {}, "is called after backward|promises how"),
        (all_reduced, {"accept": "low-precision:bf16"}, "cannot be combined with --accept"),
        (all_reduced, {"thorough": True}, "cannot be combined with --thorough"),
        (all_reduced, {"workload": "ragged_batch"}, "cannot be combined with ragged_batch"),
        (all_reduced, {"without_data": (3,)}, "3 is out of range for --world 3"),
        (all_reduced, {"without_data": (0, 1, 2)}, "leaves no rank of --world 3 with a shard"),
        (all_reduced, {"without_data": (0, 0)}, "0 is given more than once"),
    ],
)
def test_refused(strategy: object, options: dict[str, object], words: str) -> None:
    asked = {"world": 3, "workload": SMALL, "without_data": (0,), **options}
    with pytest.raises(UsageError, match=words):
        distcheck.verify(strategy, **asked)  # type: ignore[arg-type]


def test_a_wrapper_around_the_model_has_no_place_for_such_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "wraps.py"
    file.write_text(
        "from torch.nn.parallel import DistributedDataParallel\n"
        "class Wraps:\n"
        "    def wrap(self, model):\n"
        "        return DistributedDataParallel(model)\n"
    )
    with pytest.raises(UsageError, match="whose forward pass a rank without data never runs"):
        distcheck.verify(f"{file}:Wraps", world=2, workload=SMALL, steps=1, without_data=(0,))


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize(("name", "form", "rank"), RIGHT)
def test_no_false_alarm(name: str, form: str | None, rank: int, world: int) -> None:
    """Every layer, on every workload that is quick, in both dtypes."""
    for dtype in ("float32", "float64"):
        report = distcheck.verify(
            f"{FORMS}:{name}", form=form, world=world, workload=("exact", "mlp", "cnn"),
            dtype=dtype, batch=60 * (world - 1), without_data=(rank % world,),
        )  # fmt: skip
        report.raise_for_verdict()
