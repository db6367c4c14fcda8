"""Two recordings of jobs, of which the second has something changed: where they part first."""

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from distcheck.compare.command import compare_command
from distcheck.compare.jobs import compare_jobs
from distcheck.compare.records import CaseComparison, RunsComparison
from distcheck.compare.screen import render
from distcheck.errors import CannotRunError, UsageError
from distcheck.judge.divergence import noise_floor
from distcheck.judge.divergence.noise_floor import NoiseFloor, Perturbation
from distcheck.recordings.jobs import reading, records
from distcheck.recordings.jobs.reading import REPORT
from distcheck.recordings.jobs.records import RankRecord, SavedRecordingFiles, write_json
from distcheck.records import Case, CaseReport, CheckResult, Compared, Outcome, Report, VerdictName
from distcheck.records.exit_status import RankEnd
from distcheck.reports.json_report import render_json
from tests.job.recordings import Facts, gradients, make, mean, replaced


def kept(
    folder: Path, change: Callable[[Facts], None] = lambda facts: None,
    verdict: VerdictName = "unknown", **about: int,
) -> Path:  # fmt: skip
    """A recording with its report, as `--save` leaves it."""
    folder.mkdir()
    job = make(folder, change, **about)
    whole = SavedRecordingFiles(world=job.world, steps=job.steps, form=reading.FORM)
    write_json(folder / reading.MANIFEST, whole)
    case = Case(id="job", strategy="train.py", world=2, workload="job", data="job", job=("--", "x"))
    counted = Compared(tensors=2, elements=24, ranks=2, steps=3)
    checks = tuple(
        CheckResult(check=name, layer="-", verdict=verdict, compared=counted, reason="as it is")
        for name in ("outcome", "data", "initial state", "gradients", "agreement")
    )
    ends = tuple(Outcome(rank=rank, outcome=RankEnd.FINISHED) for rank in range(2))
    one = CaseReport(case=case, strategy_file="", verdict=verdict, outcomes=ends, checks=checks)
    (folder / REPORT).write_text(render_json(Report(environment={}, cases=(one,))))
    return folder


def compared(tmp_path: Path, change: Callable[[Facts], None], **about: int) -> CaseComparison:
    then, now = kept(tmp_path / "then"), kept(tmp_path / "now", change, **about)
    return compare_jobs(then, now, bits=False)[0]


def other_rate(facts: Facts) -> None:
    facts.groups = ({"lr": 0.25, "momentum": 0.0},)


def other_rows(facts: Facts) -> None:
    if facts.step == 1:
        facts.rows = tuple(reversed(facts.rows))
        facts.passes = [facts.a_pass(0)]


def other_local(facts: Facts) -> None:
    if (facts.rank, facts.step) == (1, 1):
        facts.local = {**facts.local, "bias": facts.local["bias"] + 1}


def other_exchange(facts: Facts) -> None:
    if facts.step == 2:
        facts.at_step = facts.raw
        facts.raw = {name: 2 * one for name, one in facts.raw.items()}


def other_clip(facts: Facts) -> None:
    facts.at_step = {name: one / 2 for name, one in facts.raw.items()}


def other_update(facts: Facts) -> None:
    if facts.step == 2:
        facts.after = {name: torch.zeros_like(one) for name, one in facts.before.items()}


@pytest.mark.parametrize(
    ("change", "kind", "step", "rank"),
    [
        (other_rate, "optimizer's settings", 0, 0),
        (other_rows, "sample ids", 1, 0),
        (other_local, "local gradients", 1, 1),
        (other_exchange, "reduced gradients", 2, 0),
        (other_clip, "gradients", 0, 0),
        (other_update, "parameters", 2, 0),
    ],
)
def test_where_two_jobs_part(
    tmp_path: Path, change: Callable[[Facts], None], kind: str, step: int, rank: int
) -> None:
    one = compared(tmp_path, change)
    assert one.found.first is not None
    assert (one.bits, one.verdict) == ("changed", "fail" if change is other_rate else "unknown")
    assert [cause.cause for cause in one.diagnosis] == (
        ["learning-rate-differs"] if change is other_rate
        else [] if change is other_rows else ["nondeterministic"]
    )  # fmt: skip
    assert (one.found.kind, one.found.first.step, one.found.first.rank) == (kind, step, rank)


def test_differences_before_the_first_step_are_listed_in_order(tmp_path: Path) -> None:
    def other(facts: Facts) -> None:
        other_rate(facts)
        facts.sampler = "RandomSampler"
        facts.before = {**facts.before, "bias": facts.before["bias"] + (facts.step == 0)}
        facts.rows = tuple(reversed(facts.rows))
        facts.passes = [facts.a_pass(0)]

    then, now = kept(tmp_path / "then"), kept(tmp_path / "now", other)
    for folder, seed in ((then, "0"), (now, "7")):
        file = folder / "rank-0000" / "rank.json"
        rank = msgspec.structs.replace(
            records.read_record(file, RankRecord), settings={"seed of torch": seed, "numpy": "2"},
            arguments=("python", "train.py", "--seed", seed), variables={"MASTER_PORT": seed},
        )  # fmt: skip
        write_json(file, rank)
    one, _ = compare_jobs(then, now, bits=False)
    assert [(change.name, change.then, change.now) for change in one.changes][:4] == [
        ("the command", "train.py --seed 0", "train.py --seed 7"),
        ("seed of torch", "0", "7"),
        ("lr of parameter group 0", "0.5", "0.25"),
        ("sampler of data loader 0", "DistributedSampler", "RandomSampler"),
    ]
    state, data = one.changes[4:]
    assert state.name == "the initial state of 1 of 2 tensors, first before/bias,"
    assert (data.then, data.now) == ("8 samples", "the same samples in another order")
    comparison = RunsComparison(then="then", now="now", cases=(one,))
    console = Console(width=200, file=io.StringIO())
    render(comparison, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == (
        "changed between the runs: the command was 'train.py --seed 0' and is 'train.py --seed 7'"
    )
    assert lines[5].startswith("  the data of the first step was '8 samples' and is 'the same ")
    assert lines[6].startswith("1 of 1 cases changed (first difference: ")


def test_two_runs_of_one_job_differ_in_nothing_before_the_first_step(tmp_path: Path) -> None:
    assert compared(tmp_path, lambda facts: None).changes == ()


def test_only_what_differs_of_the_settings_is_shown(tmp_path: Path) -> None:
    first = compared(tmp_path, other_rate).found.first
    assert first is not None
    assert (first.expected, first.actual) == ("lr 0.5", "lr 0.25")


def test_the_same_job_twice_has_the_same_bits(tmp_path: Path) -> None:
    one = compared(tmp_path, lambda facts: None)
    counts = {moment.kind: (moment.tensors, moment.changed) for moment in one.found.moments}
    assert (one.bits, one.found.drift) == ("same", (0.0, 0.0, 0.0))
    assert counts["gradients"] == counts["local gradients"] == (12, 0)  # 2 tensors, ranks, 3 steps


def test_beyond_the_budget_digests_are_compared(tmp_path: Path) -> None:
    one = compared(tmp_path, other_clip, budget=1)
    assert one.found.first is not None
    assert one.found.kind == "gradients"
    assert str(one.found.first.actual).startswith("digest ")


def test_only_steps_that_both_have_are_compared(tmp_path: Path) -> None:
    one = compared(tmp_path, lambda facts: None, steps=2)
    assert (one.bits, len(one.found.drift)) == ("same", 2)
    assert "only the 2 common steps are compared" in one.reason


def alone(facts: Facts) -> None:
    """One rank that has the samples of two."""
    several = [gradients(rank, facts.step) for rank in range(2)]
    facts.local = facts.raw = mean(several)
    rows = tuple(f"{rank}-{facts.step}-{i}" for rank in range(2) for i in range(4))
    facts.rows = rows[1:] + rows[:1]
    facts.passes = [facts.a_pass(0)]


def test_one_rank_and_two_are_compared_as_one_process(tmp_path: Path) -> None:
    one = compared(tmp_path, alone, world=1)
    kinds = {moment.kind for moment in one.found.moments}
    assert (one.bits, "local gradients" in kinds, "gradients" in kinds) == ("same", False, True)
    assert "2 and 1 ranks, each treated as a single process" in one.reason


def test_a_sum_of_the_ranks_is_named(tmp_path: Path) -> None:
    def sums(facts: Facts) -> None:
        facts.raw = {name: 2 * grad for name, grad in facts.raw.items()}

    then = measured(kept(tmp_path / "then", alone, verdict="pass", world=1))
    now = measured(kept(tmp_path / "now", sums, verdict="pass"))
    one = compare_jobs(then, now, bits=False)[0]
    assert (one.verdict, [cause.cause for cause in one.diagnosis]) == ("fail", ["missing-division"])
    assert one.found.beyond is not None
    assert (one.found.beyond.step, one.found.beyond_kind) == (0, "reduced gradients")


def test_random_numbers_of_other_worlds_are_others(tmp_path: Path) -> None:
    def draws(facts: Facts) -> None:
        facts.passes = [facts.a_pass(0, draws=True)]

    one = compared(tmp_path, draws, world=3)
    assert (one.verdict, one.bits) == ("unknown", "not compared")
    assert "which depend on the world size" in one.reason


def measured(folder: Path, share: float = 1e-6) -> Path:
    """A recording whose moved runs were off by a share of everything."""
    job = reading.read_recording(folder)
    steps = []
    for step in job.steps:
        found = {"loss": Perturbation(2 * share, 2.0)}
        for kind, stem in noise_floor.STEM_OF.items():
            for name in job.names(kind):
                size = noise_floor.norm_of(noise_floor.recorded_tensor(job, kind, 0, step, name))  # type: ignore[arg-type]
                found[f"{stem}/{name}"] = Perturbation(share * size, size)
        steps.append(found)
    noise_floor.write_noise_floor(NoiseFloor(steps=tuple(steps)), folder)
    return folder


def drifting(by: float) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        if facts.step == 1:
            facts.raw = {name: (1 + by) * one for name, one in facts.raw.items()}

    return change


@pytest.mark.parametrize(
    ("by", "share", "verdict"),
    [(1e-6, 1e-6, "pass"), (1e-4, 1e-6, "fail"), (1e-4, 1e-4, "pass"), (1e-4, 0.5, "unknown")],
)
def test_perturbed_runs_set_a_floor(tmp_path: Path, by: float, share: float, verdict: str) -> None:
    """A difference is within the bound or beyond it by what was measured; where moved runs have
    gradients of their own, nothing could fail, and nothing is said.
    """
    then = measured(kept(tmp_path / "then", verdict="pass"), share)
    now = measured(kept(tmp_path / "now", drifting(by), verdict="pass"), share)
    one = compare_jobs(then, now, bits=False)[0]
    assert one.verdict == verdict
    assert len(one.found.noise_floor) == (2 if verdict == "fail" else 3)
    if verdict == "fail":
        assert one.found.beyond is not None
        assert (one.found.beyond.step, one.found.beyond_kind) == (1, "reduced gradients")
    if verdict == "unknown":
        assert "differ there by as much as the gradients themselves" in one.reason


def test_an_exchange_that_is_scaled_back_is_right(tmp_path: Path) -> None:
    """What the optimizer is given decides, as against a reference."""

    def scaled(facts: Facts) -> None:
        facts.at_step = facts.raw
        facts.raw = {name: 2 * one for name, one in facts.raw.items()}

    then = measured(kept(tmp_path / "then", verdict="pass"))
    now = measured(kept(tmp_path / "now", scaled, verdict="pass"))
    one = compare_jobs(then, now, bits=False)[0]
    assert (one.verdict, one.found.kind) == ("pass", "reduced gradients")


def test_changed_bits_without_a_bound_are_no_pass(tmp_path: Path) -> None:
    """Both are right by themselves, and need not be one training."""
    then = kept(tmp_path / "then", verdict="pass")
    same, other = (
        kept(tmp_path / name, change, verdict="pass")
        for name, change in (("same", lambda facts: None), ("other", other_update))
    )
    assert compare_jobs(then, same, bits=False)[0].verdict == "pass"
    assert compare_jobs(then, other, bits=False)[0].verdict == "unknown"
    assert compare_jobs(then, other, bits=True)[0].verdict == "fail"


def test_random_numbers_count_where_they_are_drawn(tmp_path: Path) -> None:
    def drawing(draws: bool, stream: str) -> Callable[[Facts], None]:
        def change(facts: Facts) -> None:
            facts.passes = [replaced(facts.a_pass(0, draws=draws), random={"torch": stream})]

        return change

    def parts(draws: bool) -> str:
        folders = [
            kept(tmp_path / f"{draws}-{stream}", drawing(draws, stream)) for stream in ("a", "b")
        ]
        return compare_jobs(*folders, bits=False)[0].found.kind

    assert (parts(draws=True), parts(draws=False)) == ("random numbers", "")


def test_a_failed_job_is_not_right_because_it_fails_alike(tmp_path: Path) -> None:
    then, now = (kept(tmp_path / name, verdict="fail") for name in ("then", "now"))
    assert compare_jobs(then, now, bits=False)[0].verdict == "fail"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["then"], "does not rerun; pass the folder of the second recording"),
        (["then", "empty"], "does not have the recording of a job"),
        (["empty", "then"], "does not have the recording of a job"),
    ],
)
def test_what_cannot_be_compared_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    kept(tmp_path / "then")
    (tmp_path / "empty").mkdir()
    then, now = (*words, None)[:2]
    assert then is not None
    with pytest.raises(UsageError, match=said):
        compare_command(then, now, bits=False, files={}, trusted=False, quiet=True)


def test_a_parameter_of_another_dtype_is_said_to_be(tmp_path: Path) -> None:
    """What is the same but for its dtype is no other start."""

    def doubles(facts: Facts) -> None:
        facts.before = {name: one.double() for name, one in facts.before.items()}

    one = compared(tmp_path, doubles)
    assert one.found.first is not None
    assert one.found.kind == "initial state, in a different dtype"
    assert str(one.found.first.expected).startswith("torch.float32 (")
    assert str(one.found.first.actual).startswith("torch.float64 (")


def test_another_model_is_refused(tmp_path: Path) -> None:
    then, now = kept(tmp_path / "then"), kept(tmp_path / "now")
    for file in now.glob("rank-*/step-*.json"):
        file.write_text(file.read_text().replace("bias", "other"))
    with pytest.raises(UsageError, match="of different models: only one of them has the"):
        compare_jobs(then, now, bits=False)


def no_cases(folder: Path) -> None:
    report = folder / REPORT
    document = json.loads(report.read_text())
    document["cases"], document["totals"]["unknown"] = [], 0
    report.write_text(json.dumps(document))


def last_step(folder: Path) -> None:
    for file in folder.glob("rank-*/step-000002.*"):
        file.unlink()


def one_rank(folder: Path) -> None:
    shutil.rmtree(folder / "rank-0001")


def other_version(folder: Path) -> None:
    (folder / reading.MANIFEST).unlink()


def less_than_none(folder: Path) -> None:
    (folder / noise_floor.FILE).write_text('{"steps": [{"loss": [-1, 2]}]}')


def other_digest(folder: Path) -> None:
    file = folder / "rank-0001" / "step-000001.json"
    document = json.loads(file.read_text())
    document["digests"]["after/weight"] = "\x1b[2J"
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "harm",
    [
        no_cases,
        other_digest,
        lambda folder: (folder / REPORT).unlink(),
        last_step,
        one_rank,
        other_version,
        less_than_none,
    ],
)
def test_an_edited_recording_is_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    then, now = (kept(tmp_path / name) for name in ("then", "now"))
    harm(now)
    said = "is damaged|cannot be read|is truncated|has only the ranks 0|by a different version"
    with pytest.raises(UsageError, match=f"{now}.* ({said})"):
        compare_jobs(then, now, bits=False)


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    """And not a pipe of the running job, nor over a folder that is there."""
    folder = kept(tmp_path / "then")
    os.mkfifo(folder / "ask-1")
    job = reading.read_recording(folder)
    reading.save_recording(job, tmp_path / "again")
    assert reading.read_saved_recording(tmp_path / "again").steps == (0, 1, 2)
    assert not (tmp_path / "again" / "ask-1").exists()
    with pytest.raises(CannotRunError, match="cannot be kept in"):
        reading.save_recording(job, tmp_path / "again")
