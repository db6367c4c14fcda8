"""What is kept of a whole job, and read again."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from distcheck.cli.commands import job, replay
from distcheck.errors import UsageError
from distcheck.job.judging import case_of_command
from distcheck.job.options import JobOptions
from distcheck.store.bundle import make_bundle


def written(folder: Path, *words: str) -> Path:
    """The case of a job as it is kept."""
    file = folder / "cases" / "job.json"
    file.parent.mkdir()
    case = case_of_command(JobOptions(words=words), script="train.py", world=2)
    file.write_bytes(msgspec.json.encode(case))
    return file


def replayed(file: Path, *options: str) -> Result:
    return CliRunner().invoke(replay.command, [str(file), *options], standalone_mode=False)


def test_a_replay_has_the_options_that_may_have_caused_the_verdict() -> None:
    asked = JobOptions(
        words=("train",), steps=4, keep_going=True, deadline_s=90.0, reference="python one.py",
        save="kept",
    )  # fmt: skip
    case = case_of_command(asked, script="train.py", world=2)
    assert case.command_line == (
        "distcheck job --reference 'python one.py' --steps 4 --keep-going --deadline 90s -- train"
    )
    read = job.command.make_context("job", [*case.job])
    assert (read.params["keep_going"], read.params["deadline_s"]) == (True, 90.0)
    plain = case_of_command(JobOptions(words=("train",)), script="train.py", world=2)
    assert plain.command_line == "distcheck job -- train"


def test_a_command_runs_after_a_yes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lies among this folder's own runs: a folder from elsewhere may hold some."""
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    monkeypatch.setattr(
        "distcheck.cli.commands.job._run", lambda words, asked, quiet: ran.append([*words]) or 1 / 0
    )
    own = tmp_path / ".distcheck" / "runs" / "20260101-000000-1"
    own.mkdir(parents=True)
    file = written(own, "touch", "was-run", "\x1b[31m")
    error = replayed(file).exception
    assert isinstance(error, UsageError)
    assert "touch was-run" in str(error)
    assert "\x1b" not in str(error)
    assert not ran
    assert isinstance(replayed(file, "--trust").exception, ZeroDivisionError)
    assert ran == [["touch", "was-run", "\x1b[31m"]]


def test_what_is_no_command_is_refused(tmp_path: Path) -> None:
    error = replayed(written(tmp_path, "python", "a\0b"), "--trust").exception
    assert isinstance(error, UsageError)
    assert "contains a NUL character" in str(error)


def test_a_job_is_not_bundled(tmp_path: Path) -> None:
    written(tmp_path, "python", "train.py")
    with pytest.raises(UsageError, match="it belongs to a job; use distcheck replay or open"):
        make_bundle(tmp_path, tmp_path / "bundle.zip", traces=False)
