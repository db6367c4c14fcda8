"""Two recordings of jobs, of which the second has something changed: where they part first."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distcheck.compare.command import compare_command
from distcheck.compare.jobs import compare_jobs
from distcheck.compare.records import CaseComparison
from distcheck.errors import CannotRunError, UsageError
from distcheck.recordings.jobs import reading
from distcheck.recordings.jobs.reading import REPORT
from distcheck.records import Case, CaseReport, CheckResult, Compared, Outcome, Report, VerdictName
from distcheck.records.ends import RankEnd
from distcheck.reports.json_report import render_json
from tests.job.recordings import Facts, make, replaced


def kept(
    folder: Path, change: Callable[[Facts], None] = lambda facts: None,
    verdict: VerdictName = "unknown", **about: int,
) -> Path:  # fmt: skip
    """A recording with its report, as `--save` leaves it."""
    folder.mkdir()
    make(folder, change, **about)
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
        (other_exchange, "exchanged gradients", 2, 0),
        (other_clip, "gradients", 0, 0),
        (other_update, "parameters", 2, 0),
    ],
)
def test_where_two_jobs_part(
    tmp_path: Path, change: Callable[[Facts], None], kind: str, step: int, rank: int
) -> None:
    one = compared(tmp_path, change)
    assert one.found.first is not None
    assert (one.bits, one.verdict) == ("changed", "unknown")
    assert (one.found.kind, one.found.first.step, one.found.first.rank) == (kind, step, rank)


def test_only_what_differs_of_the_settings_is_shown(tmp_path: Path) -> None:
    first = compared(tmp_path, other_rate).found.first
    assert first is not None
    assert (first.expected, first.actual) == ("lr 0.5", "lr 0.25, momentum 0")


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


@pytest.mark.parametrize(
    ("about", "said"),
    [({"world": 3}, "has 2 ranks, and the later one 3"), ({"steps": 2}, "has the steps 0, 1, 2")],
)
def test_other_trainings_are_not_compared(tmp_path: Path, about: dict[str, int], said: str) -> None:
    one = compared(tmp_path, lambda facts: None, **about)
    assert (one.verdict, one.bits) == ("unknown", "not compared")
    assert said in one.reason


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
        (["then"], "does not run again; give the folder of the second one"),
        (["then", "empty"], "does not hold the recording of a job"),
        (["empty", "then"], "does not hold the recording of a job"),
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
    def doubles(facts: Facts) -> None:
        facts.before = {name: one.double() for name, one in facts.before.items()}

    first = compared(tmp_path, doubles).found.first
    assert first is not None
    assert str(first.expected).startswith("torch.float32 (")
    assert str(first.actual).startswith("torch.float64 (")


def no_cases(folder: Path) -> None:
    report = folder / REPORT
    document = json.loads(report.read_text())
    document["cases"], document["totals"]["unknown"] = [], 0
    report.write_text(json.dumps(document))


def other_digest(folder: Path) -> None:
    file = folder / "rank-0001" / "step-000001.json"
    document = json.loads(file.read_text())
    document["digests"]["after/weight"] = "\x1b[2J"
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "harm", [no_cases, other_digest, lambda folder: (folder / REPORT).unlink()]
)
def test_an_edited_recording_is_refused(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    then, now = (kept(tmp_path / name) for name in ("then", "now"))
    harm(now)
    with pytest.raises(UsageError, match=f"{now}.* (is damaged|cannot be read)"):
        compare_jobs(then, now, bits=False)


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    """And not a pipe of the running job, nor over a folder that is there."""
    folder = kept(tmp_path / "then")
    os.mkfifo(folder / "ask-1")
    reading.keep(folder, tmp_path / "again")
    assert reading.read(tmp_path / "again").steps == (0, 1, 2)
    assert not (tmp_path / "again" / "ask-1").exists()
    with pytest.raises(CannotRunError, match="cannot be kept in"):
        reading.keep(folder, tmp_path / "again")
