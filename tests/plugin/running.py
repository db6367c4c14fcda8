"""Somebody's pytest, run on a text in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.world import warm

_TIMEOUT_S = 400


def run_pytest(
    folder: Path, text: str, *options: str, columns: int = 150, **more: object
) -> subprocess.CompletedProcess[str]:
    """Writes test_it.py and runs pytest on it, in a new interpreter; `more` is for
    subprocess.run.
    """
    _write(folder, text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        **more,  # type: ignore[call-overload]
    )


def run_warm(
    folder: Path, text: str, *options: str, columns: int = 150
) -> subprocess.CompletedProcess[str]:
    """The same in a process that has imported torch, for tests of what it says (`warm.py`)."""
    _write(folder, text)
    words = ["-p", "no:cacheprovider", *options]
    environment = {**os.environ, "COLUMNS": str(columns)}
    return warm.run(*words, cwd=folder, env=environment, timeout=_TIMEOUT_S, program="pytest")


def _write(folder: Path, text: str) -> None:
    """Write test_it.py, and settings for pytest if there are none: it would take those of a folder
    above, which belongs to somebody else.
    """
    (folder / "test_it.py").write_text(text)
    if not any((folder / name).exists() for name in ("pytest.ini", "pyproject.toml", "tox.ini")):
        (folder / "pytest.ini").write_text("[pytest]\n")
