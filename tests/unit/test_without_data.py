"""Ranks without data, where no rank is needed: shards, coverage, the words of causes."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcheck.cli import root_command
from distcheck.contract import Contract, Step
from distcheck.errors import UsageError
from distcheck.judge.diagnosis import diagnose
from distcheck.judge.diagnosis.gradients import explain, explain_step
from distcheck.judge.diagnosis.measurements import (
    GradientMatch,
    Measurements,
    NonFiniteGradient,
    StepFacts,
)
from distcheck.plan.case_remarks import notes_on_case
from distcheck.plan.cases import check_request, plan_cases
from distcheck.plan.configuration import read_configuration
from distcheck.plan.settings import Request
from distcheck.recordings.recording import Kind
from distcheck.recordings.traces.header import StepHeader
from distcheck.recordings.traces.reader import TraceReader
from distcheck.recordings.traces.writer import TraceWriter
from distcheck.records import Adaptation, Case
from distcheck.training.loading import load_workload
from distcheck.training.loop import ShardReader
from tests.optional import needs
from tests.unit.test_diagnosis import ENDS, Weights, equal, failed, measured
from tests.unit.test_plan import checks
from tests.unit.test_traces import LAYOUT, new_file

NOTHING = Contract()


def case(world: int, *without: int, batch: int = 255, workload: str = "mlp") -> Case:
    request = Request(
        strategies=("allreduce",), worlds=(world,), workloads=(workload,), dtype="float32",
        batch=batch, adaptation=Adaptation(without_data=without),
    )  # fmt: skip
    return plan_cases(request)[0]


def test_who_has_data_is_part_of_the_case_and_of_its_command() -> None:
    assert case(4).with_data == (0, 1, 2, 3)
    assert case(4, 0, 2).with_data == (1, 3)
    assert "--without-data 0 --without-data 2" in case(4, 0, 2).command_line


@given(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2), st.data())
def test_usual_shards_of_the_others(world: int, more: int, step: int, data: st.DataObject) -> None:
    without = data.draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=world - 1))
    ranks = [rank for rank in range(world) if rank not in without]
    loaded, batch = load_workload("mlp"), len(ranks) + more

    def read(count: int, rank: int | None) -> list[int]:
        shards = ShardReader(loaded, size=3 * batch, batch=batch, world=count, rank=rank, seed=7)
        return shards.read(step)[1].tolist()

    found = [i for position in range(len(ranks)) for i in read(len(ranks), position)]
    assert sorted(found) == sorted(read(1, 0))
    assert read(len(ranks), None) == []


def test_a_mean_counts_the_ranks_with_data() -> None:
    step = Step(index=0, rank=1, world_size=4, samples=86, total_samples=256, ranks_with_data=3)
    assert step.shards == 3
    assert step.weight == 86 * 3 / 256
    assert Step(index=0, rank=1, world_size=4, samples=64, total_samples=256).shards == 4


def test_owed_is_what_ranks_with_data_have() -> None:
    asked = case(4, 0)
    every, some = checks(case(4), NOTHING), checks(asked, NOTHING, sizes=(85, 85, 85))
    assert set(every) == set(some)
    for check, planned in some.items():
        whole = check[0] in ("outcome", "initial state", "rerun")
        assert planned.required.ranks == (4 if whole else 3), check
        if not whole and check[0] not in ("data",):
            assert planned.required.elements * 4 == every[check].required.elements * 3, check
    assert some["data", "-"].required.elements == 255 * asked.steps
    assert "the expectation is the mean over the 3 with data" in " ".join(
        notes_on_case(asked, [(85,) * 3])
    )


def test_exact_sums_are_those_of_the_ranks_with_data() -> None:
    """255 samples over 4 ranks have weights that are not; over 3 ranks they are equal."""
    over_three = checks(case(4, 0, workload="exact"), NOTHING, sizes=(85,) * 3)
    over_four = checks(case(4, workload="exact"), NOTHING, sizes=(64, 64, 64, 63))
    assert ("gradients", "exact") in over_three
    assert ("gradients", "exact") not in over_four


@pytest.mark.parametrize(
    ("without", "options", "words"),
    [
        ((4,), {}, "4 is out of range for --world 4; ranks are 0 to 3"),
        ((-1,), {}, "-1 is out of range"),
        ((0, 1, 2, 3), {}, "leaves no rank of --world 4 with a shard"),
        ((1, 1), {}, "1 is given more than once"),
        ((0,), {"accept": "quantized:8"}, "--accept quantized:8"),
        ((0,), {"thorough": True}, "cannot be combined with --thorough"),
        ((0,), {"workloads": ("mlp", "accumulation")}, "cannot be combined with accumulation"),
        ((0,), {"batch": 2}, "--batch 2 is smaller than the 3 ranks with data"),
    ],
)
def test_refused(without: tuple[int, ...], options: dict[str, object], words: str) -> None:
    asked = {"strategies": ("ddp",), "adaptation": Adaptation(without_data=without), **options}
    with pytest.raises(UsageError, match=words):
        check_request(Request(**asked))  # type: ignore[arg-type]


def test_a_trace_of_some_ranks_is_that_of_a_smaller_world() -> None:
    fd = new_file()
    for rank in range(LAYOUT.world):
        writer = TraceWriter(fd, LAYOUT, rank)
        writer.put(Kind.GRADIENT, 0, 0, torch.full((3, 5), float(rank)))
        for step in range(LAYOUT.steps):
            header = StepHeader(
                ids=(rank,), loss=1.0, loss_factor=1.0, epoch=0, rng_state=b"", ready_order=()
            )
            writer.put_header(step, header)
    whole = TraceReader(fd, LAYOUT)
    assert whole.of_ranks(range(LAYOUT.world)) is whole
    last = whole.of_ranks([LAYOUT.world - 1])
    assert (last.layout.world, last.ranks) == (1, (LAYOUT.world - 1,))
    assert last.steps_written() == LAYOUT.steps
    assert last.header(0, 0).ids == (LAYOUT.world - 1,)
    (found, *_) = last.tensors(0, Kind.GRADIENT, 0)
    assert found is not None
    assert float(found[0, 0]) == LAYOUT.world - 1
    assert last.entry(0, Kind.GRADIENT, 0, 0) == whole.entry(LAYOUT.world - 1, Kind.GRADIENT, 0, 0)
    os.close(fd)


THIRD = [1 / 3] * 3
MIXED = GradientMatch(
    kind="mixed", rank=0, parameter="p0", distance=0.0, bound=1.0, other="p2", ranks=(0, 2)
)  # fmt: skip
NOT_FINITE = NonFiniteGradient(rank=0, parameter="p0", count=2, before=(0, 2))
ALIKE = ((0, 2), (1,))


def server(weights: Weights, **changed: object) -> StepFacts:
    """A step of a world of 4 whose rank 0 has no data."""
    step = msgspec.structs.replace(measured(weights, equal(3), seed=1), ranks=(1, 2, 3))
    return msgspec.structs.replace(step, **changed)


@pytest.mark.parametrize(
    ("cause", "weights", "changed", "words"),
    [
        ("dropped-rank", [[0.5, 0.5, 0.0]] * 3, {},
         ("excludes rank 3 from", "if rank 3 is a server", "pass --without-data 3,")),
        ("dropped-rank", [THIRD, THIRD, [0.5, 0.5, 0.0]], {},
         ("on ranks 1, 2 1, 1, 1; on rank 3 1, 1, 0",)),
        ("duplicated-rank", [[0.0, 1 / 3, 2 / 3]] * 3, {}, ("weights 0, 1, 2 on", "0 on rank 1")),
        ("single-rank-gradient", [[0.0, 1.0, 0.0]] * 3, {}, ("holds rank 2's local gradient",)),
        ("single-rank-gradient", [[0.3, 0.6, 0.9], THIRD, [0.3, 0.6, 0.9]], {},
         ("only rank 2 holds the mean",)),
        ("missing-sync", [[1.0, 0.0, 0.0], THIRD, THIRD], {}, ("rank 1 held only the local",)),
        ("missing-division", [THIRD, [1.0] * 3, [1.0] * 3], {},
         ("the factor of ranks 2, 3 differs",)),
        ("bucket-reused-in-flight", [[0.3, 0.6, 0.9], THIRD, THIRD], {"matches": (MIXED,)},
         ("in the result of rank 1 for p0, ranks 1, 3 contributed",)),
        ("partial-sync", [THIRD] * 3, {"missing": (("p0", 1),), "missing_elsewhere": True},
         ("no gradient on rank 2,",)),
        ("nonfinite", [THIRD] * 3, {"not_finite": NOT_FINITE},
         ("p0, rank 1: 2 elements", "local gradient on ranks 1, 3", "samples of ranks 1, 3")),
        ("optimizer-not-stepped", [THIRD] * 3, {"parameters": (), "unchanged": (0, 2)},
         ("changed on ranks 1, 3,",)),
        ("unexplained", [THIRD, [0.3, 0.7, 0.9], THIRD], {"alike": ALIKE},
         ("wrong on rank 2;", "agree: ranks 1, 3;", "in rank 2's result")),
    ],
)  # fmt: skip
def test_causes_name_ranks_as_they_were_run(
    cause: str, weights: Weights, changed: dict[str, object], words: tuple[str, ...]
) -> None:
    step = server(weights, **changed)
    if any(match.kind == "mixed" for match in step.matches):
        step = msgspec.structs.replace(step, parameters=step.parameters[:1])
    check = "parameters" if step.unchanged else "gradients"
    found = diagnose(ENDS, [failed(check, "rounding")], Measurements(world=4, steps=(step,)))
    (said,) = [f"{d.evidence}; {d.suggestion}" for d in found if d.cause == cause]
    for word in words:
        assert word in said


def test_what_is_listed_by_rank_says_whose_it_is() -> None:
    step = server([[0.5, 0.5, 0.0]] * 3)
    (found,) = explain(Measurements(world=4, steps=(step,)))
    assert found.evidence.endswith("(of ranks 1, 2, 3, which have data)")
    for every in ((), (0, 1, 2)):
        whole = msgspec.structs.replace(step, ranks=every)
        (found,) = explain(Measurements(world=3, steps=(whole,)))
        assert "data" not in found.evidence
        assert "excludes rank 2 from" in found.suggestion


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("dropped", [0, 1])
def test_a_rank_that_is_missing_from_a_right_mean_may_be_a_server(world: int, dropped: int) -> None:
    others = [float(rank != dropped) / (world - 1) for rank in range(world)]
    found = explain_step(measured([others] * world, equal(world), seed=2))
    (hint,) = [f.suggestion for f in found if f.cause == "dropped-rank"]
    assert f"--without-data {dropped}," in hint


@pytest.mark.parametrize("weights", [[0, 0.25, 0.25, 0.25], [0, 0, 0.5, 0.5]])
def test_other_means_are_no_server(weights: list[float]) -> None:
    """One that is divided by all ranks, or lacks two of them."""
    (found,) = explain_step(measured([weights] * 4, equal(4), seed=3))
    assert found.cause == "dropped-rank"
    assert "--without-data" not in found.suggestion


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["explore", "--strategy", "ddp"],
         "not supported by explore, whose cases assign a shard to every rank"),
        (["train", "--strategy", "ddp", "--world", "2"], "train, because every rank needs a shard"),
        (["verify", "--strategy", "ddp", "--world", "1"],
         "leaves no rank of --world 1 with a shard"),
    ],
)  # fmt: skip
@needs("explore")
def test_commands_that_refuse(command: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        root_command([*command, "--without-data", "0"], standalone_mode=False)


def test_the_gate_has_a_key_for_it(tmp_path: Path) -> None:
    file = tmp_path / "matrix.toml"
    file.write_text('strategies = ["ddp"]\nwithout_data = [0, 2]\n')
    assert read_configuration(str(file)).keys["without_data"] == [0, 2]
    file.write_text('strategies = ["ddp"]\nwithout_data = [0, 0]\n')
    with pytest.raises(UsageError, match="--without-data 0 is given more than once"):
        read_configuration(str(file))
