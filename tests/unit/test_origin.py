"""Where a run comes from: its date, its command line, and the state of the user's code."""

import os
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


def test_a_commit_and_local_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("scope", ["--local", "--worktree"])
@pytest.mark.parametrize("kind", ["clean", "process"])
def test_a_repository_from_elsewhere_runs_no_filter(
    scope: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = repository(tmp_path, monkeypatch)
    git("config", "extensions.worktreeConfig", "true")
    git("config", scope, f"filter.a b=c.{kind}", f"touch {tmp_path}/ran; cat")
    (here / ".git/info/attributes").write_text("* filter=a b=c\n")
    os.utime("sync.py", (0, 0))  # so that git looks whether it has changed
    found = origin_here()
    assert (found.commit, found.clean) == (git("rev-parse", "HEAD"), None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("is_used", [True, False])
def test_a_filter_of_the_user_starts_nothing_that_a_repository_names(
    is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git-lfs, which most people have in their own configuration, starts programs that are named
    in the repository's.
    """
    repository(tmp_path, monkeypatch)
    own = tmp_path / "gitconfig"
    own.write_text(
        f'[filter "lfs"]\n\tclean = touch {tmp_path}/ran; cat\n\trequired = true\n'
        "[user]\n\tname = a\n\temail = a@b\n"
    )
    if is_used:
        Path(".gitattributes").write_text("*.py filter=lfs\n")
        git("add", ".gitattributes")
        git("commit", "-qm", "attributes")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(own))
    os.utime("sync.py", (0, 0))
    assert origin_here().clean is (None if is_used else True)
    assert not (tmp_path / "ran").exists()


def test_a_hostile_repository_is_inert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor, a hook, a submodule's filter, and a remote from which an object is missing."""
    here = repository(tmp_path, monkeypatch)
    sub = here / "sub"
    sub.mkdir()
    monkeypatch.chdir(sub)
    commit()
    git("config", "filter.evil.clean", f"touch {tmp_path}/ran; cat")
    (sub / ".git/info/attributes").write_text("* filter=evil\n")
    os.utime("sync.py", (0, 0))
    monkeypatch.chdir(here)
    git("add", "sub")
    git("commit", "-qm", "sub")
    git("config", "core.fsmonitor", f"touch {tmp_path}/ran")
    hook = here / ".git/hooks/post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    os.utime("sync.py", (0, 0))
    assert origin_here().clean is True
    (tree,) = (here / ".git/objects").glob(f"{(t := git('rev-parse', 'HEAD^{tree}'))[:2]}/{t[2:]}")
    tree.unlink()
    git("config", "extensions.partialClone", "origin")
    git("config", "remote.origin.promisor", "true")
    git("config", "remote.origin.url", f"ext::sh -c 'touch {tmp_path}/ran'")
    git("config", "protocol.ext.allow", "always")
    assert origin_here().clean is None
    assert not (tmp_path / "ran").exists()


def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    commit()
    return here


def commit() -> None:
    git("init", "-q")
    Path("sync.py").write_text("1\n")
    git("add", "sync.py")
    git("commit", "-qm", "one")


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
