"""Origin of a run: date, command line, and the commit and state of the code.

A repository from an unknown source may have a configuration that names programs. This module uses
only git commands that never start such programs.
"""

import os
import re
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from distcheck.records.run_facts import Origin

_PATIENCE_S = 5.0  # for git, in a repository of any size


def origin_here() -> Origin:
    commit = run_git("rev-parse", "--verify", "HEAD")
    changed, filters = None, _filters()
    if commit and filters is not None:
        changed = run_git(*filters, "status", "--porcelain", "--ignore-submodules=dirty")
    return Origin(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command_line(),
        commit=(commit or "").strip(),
        clean=None if changed is None else not changed,
    )


def command_line() -> str:
    """Return the command line without the program's folder; "" if the program has no name."""
    program, *words = sys.argv or [""]
    if program in ("", "-c"):
        return ""
    name = Path(program).name
    return shlex.join(["distcheck" if name == "__main__.py" else name, *words])


def _filters() -> list[str] | None:
    """Return the options that switch off the filters of the user's own configuration: git starts
    them to see whether a file has changed, and they may start what a repository names (git-lfs
    has `lfs.extension.*`). None if files cannot be compared without filters: some pass through
    one, or the repository's own configuration, or one that cannot be read, names filters.
    """
    listed = run_git("config", "--list", "--show-scope", "--name-only", "-z")
    if listed is None:
        return None
    scopes, names = listed.split("\0")[::2], listed.split("\0")[1::2]
    options = []
    for scope, name in zip(scopes, names, strict=False):
        if not name.startswith("filter."):
            continue
        filter_name = name.removeprefix("filter.").rpartition(".")[0]
        if scope in ("local", "worktree") or not re.fullmatch(r"[\w-]+", filter_name):
            return None
        if run_git("ls-files", "-z", "--", f":(top,attr:filter={filter_name})") != "":
            return None
        for key, value in (("clean", ""), ("smudge", ""), ("process", ""), ("required", "false")):
            options += ["-c", f"filter.{filter_name}.{key}={value}"]
    return options


def run_git(*words: str) -> str | None:
    """Return git's output; None without git, without a repository, or after a timeout."""
    command = ["git", "-c", "core.fsmonitor=false", *words]
    environment = {
        **os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
    }  # fmt: skip
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return ran.stdout if ran.returncode == 0 else None
