"""Somebody's pytest, run on a text in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path


def run_pytest(
    folder: Path, text: str, *options: str, columns: int = 150, **more: object
) -> subprocess.CompletedProcess[str]:
    """Writes test_it.py and runs pytest on it; `more` is for subprocess.run."""
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=400,
        **more,  # type: ignore[call-overload]
    )
