"""`--on slurm` with submitit's own executor of this machine, in place of a cluster's sbatch."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from distcheck.addons.engines import on_slurm
from distcheck.addons.engines.running import MatrixTask
from distcheck.errors import CannotRunError
from tests.world.command import QUICK, Run, complaints
from tests.world.command import distcheck as distcheck

WORDS = ("verify", "--strategy", "bad.py:good", "--strategy", "bad.py:no_sync", *QUICK)


@pytest.mark.sweep
def test_parts_are_judged_and_joined(distcheck: Run, tmp_path: Path) -> None:
    ran = distcheck(*WORDS, "--on", "slurm://local", "--json", "whole.json")
    assert ran.returncode == 1, ran.stderr
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [case["verdict"] for case in whole["cases"]] == ["pass", "fail"]
    assert [part["shard"] for part in whole["parts"]] in ([1, 2], [2, 1])
    assert "2 parts on slurm; code: it is loaded by its path" in ran.stderr
    assert "1 failed, 1 passed" in ran.stdout
    assert not complaints(ran.stderr)


def test_what_goes_with_no_engine_is_said(distcheck: Run) -> None:
    ran = distcheck(*WORDS, "--on", "slurm", "--shard", "1/2")
    assert ran.returncode == 2
    assert "--on cannot be combined with --shard: it splits the whole matrix" in ran.stderr


@pytest.mark.parametrize(
    ("sbatch", "expected"),
    [
        (
            "printf '\\033[2J\\n::error::evil\\n' >&2; exit 1",
            r"did not start the jobs \(\x1b\[2J\)",
        ),
        ("echo invalid partition >&2; exit 1", r"did not start the jobs \(invalid partition\)"),
        ("echo garbage", r"did not start the jobs \(Could not make sense of sbatch output"),
        ("printf '\\377'", "did not start the jobs"),
    ],
)
def test_a_submission_that_fails_is_one_sentence(
    sbatch: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It was reported as a defect, and sbatch's errors went to the terminal as they were."""
    for name, script in (("sbatch", sbatch), ("srun", "exit 0"), ("scancel", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRunError, match=expected):
        on_slurm.start("", [MatrixTask(1, "part", ("--secret", "hunter2-hunter2"), 2, 0)])
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert [*tmp_path.rglob("*.pkl")] == []


def test_pickles_are_private_and_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments, which may contain a secret, are in them as they are."""
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o022)
    try:
        engine = on_slurm.start("local", [MatrixTask(1, "part", ("--help",), 2, 0)])
        modes = {file.stat().st_mode & 0o777 for file in tmp_path.rglob("*.pkl")}
        assert modes == {0o600}
        engine.close()
        assert [*tmp_path.rglob("*.pkl")] == []
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_no_file_of_the_current_folder_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by submitit's process on this machine nor by a task."""
    (tmp_path / "random.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a')\n")
    monkeypatch.chdir(tmp_path)
    engine = on_slurm.start("local", [MatrixTask(1, "part", ("--help",), 2, 0)])
    try:
        assert Path.cwd() == tmp_path
        ended = []
        while not ended:
            ended = [*engine.ended()]
    finally:
        engine.close()
    assert [outcome for _, outcome in ended] == [(0, "", "")]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("parts", [1, 2])  # two are an array of jobs
def test_python_of_a_job_does_not_search_the_current_folder(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (
        ("sbatch", f'cp "$1" {tmp_path}/job; echo Submitted batch job 7'),
        ("srun", "exit 0"),
        ("scancel", "exit 0"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    work = [MatrixTask(number, "part", ("--help",), 2, 0) for number in range(parts)]
    on_slurm.start("", work).close()
    assert f"{shlex.quote(sys.executable)} -P -u -m submitit" in (tmp_path / "job").read_text()
