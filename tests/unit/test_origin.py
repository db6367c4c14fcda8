"""Where a run comes from: its date, its command line, and the state of the user's code."""

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from distcheck.store.origin import command_line, origin_here


def git(*words: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=e@x"]
    ran = subprocess.run(["git", *names, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def test_a_commit_and_whether_anything_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (origin_here().commit, origin_here().clean) == ("", None), "no repository"
    git("init", "-q")
    assert (origin_here().commit, origin_here().clean) == ("", None), "no commit"
    Path("sync.py").write_text("1\n")
    git("add", "sync.py")
    git("commit", "-qm", "one")
    assert (origin_here().commit, origin_here().clean) == (git("rev-parse", "HEAD"), True)
    Path("other.py").write_text("")
    assert origin_here().clean is False, "a file that is in no commit"
    Path("other.py").unlink()
    Path("sync.py").write_text("2\n")
    assert origin_here().clean is False
    made = datetime.fromisoformat(origin_here().date)
    assert made.tzinfo is not None
    assert abs((datetime.now().astimezone() - made).total_seconds()) < 60


def test_the_run_goes_on_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (origin_here().commit, origin_here().clean) == ("", None)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["/usr/bin/distcheck", "verify", "--arg", "a b"], "distcheck verify --arg 'a b'"),
        (["/x/distcheck/__main__.py", "verify"], "distcheck verify"),
        (["/x/bin/pytest", "tests"], "pytest tests"),
        (["-c"], ""),
        ([""], ""),
    ],
)
def test_the_command_line(monkeypatch: pytest.MonkeyPatch, typed: list[str], line: str) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert command_line() == line
