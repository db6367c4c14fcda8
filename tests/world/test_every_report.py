"""Every JSON that a command writes is read by `report` and `merge`, or refused by its name."""

import json
import sys
from pathlib import Path

import click
import pytest

from distcheck.cli import root_command
from distcheck.reports.json_report import SCHEMA
from tests.job.planted import FOLDER
from tests.optional import needs_all
from tests.world.command import QUICK, Run
from tests.world.warm import distcheck

__all__ = ["distcheck"]

SCRIPT = (sys.executable, "right.py")
ALONE = ("--nproc", "2", "--steps", "2", "--no-reference", "--", sys.executable)
# The words behind a command that has --json, and how it ends; in a folder with a run that failed.
REPORTS = [
    ("verify", ("--strategy", "allreduce", *QUICK), 0),
    ("verify", ("--strategy", "bad.py:crash", *QUICK), 4),
    ("replay", ("failed",), 1),
    ("recheck", ("failed",), 1),
    ("merge", ("failed.json",), 1),
    ("report", ("failed.json",), 0),
    ("scale", ("--strategy", "allreduce", "--world", "2,3"), 0),
    ("job", ("--nproc", "2", "--steps", "2", "--", *SCRIPT), 0),
    ("job", (*ALONE, "wrong.py"), 1),
    ("job", ("--guard", "--every", "2", "--nproc", "2", "--", *SCRIPT), 0),
]  # fmt: skip
# Those whose JSON is of another kind.
OTHERS = {
    "compare": "distcheck.comparison/1", "explore": "distcheck.explore/1",
    "train": "distcheck.training/1", "plan": "distcheck.plan/1",
    "backends": "distcheck.backends/1", "selftest": "distcheck.selftest/1",
    **{name: f"distcheck.{name}/1" for name in ("explain", "list", "runs", "doctor")},
}  # fmt: skip


@needs_all
def test_every_command_with_json_is_here() -> None:
    context = click.Context(root_command)
    commands = {
        name: root_command.get_command(context, name)
        for name in root_command.list_commands(context)
    }
    with_json = {
        name
        for name, command in commands.items()
        if command and "json_file" in {param.name for param in command.get_params(context)}
    }
    assert with_json == {name for name, _, _ in REPORTS} | OTHERS.keys()


@pytest.mark.sweep  # of every run: verify's in test_gate.py, a job's in .ci/plain
@needs_all
def test_each_report_is_read_again(distcheck: Run, tmp_path: Path) -> None:
    keep = ("--strategy", "bad.py:no_sync", *QUICK, "--save", "failed", "--json", "failed.json")
    assert distcheck("verify", *keep).returncode == 1
    right = (FOLDER / "by_hand.py").read_text()
    (tmp_path / "right.py").write_text(right)
    (tmp_path / "wrong.py").write_text(right.replace("dist.all_reduce(", "(lambda *_: None)("))
    written = []
    for number, (command, words, code) in enumerate(REPORTS):
        file = f"{number}.json"
        ran = distcheck(command, "--json", file, *words)
        assert ran.returncode == code, (command, ran.stdout, ran.stderr)
        read = distcheck("report", file, "--junit", f"{number}.xml", "--html", f"{number}.html")
        assert read.returncode == 0, (command, read.stderr)
        printed = distcheck("report", file)
        document = json.loads((tmp_path / file).read_text())
        assert document["verdict"].upper() in printed.stdout, command
        joined = distcheck("merge", file, "-q")
        assert joined.returncode == document["exit_code"], (command, joined.stdout, joined.stderr)
        written.append(file)
    whole = distcheck("merge", *written[-3:], "failed.json", "--json", "whole.json")
    assert whole.returncode == 1, whole.stderr
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [case["case"]["id"] for case in whole["cases"]] == [
        "bad-no_sync-w2-mlp-small-float32", "job", "job-2", "guard",
    ]  # fmt: skip
    assert distcheck("report", "whole.json").returncode == 0


@pytest.mark.parametrize("schema", OTHERS.values())
def test_another_kind_is_refused_by_its_name(schema: str, distcheck: Run, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"schema": schema}))
    for command in ("report", "merge"):
        ran = distcheck(command, "other.json")
        assert ran.returncode == 2
        assert f"other.json has the schema {schema!r}; this version reads {SCHEMA!r}" in ran.stderr
