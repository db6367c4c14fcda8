"""Task of an engine: judges one part of a matrix in a process, and returns the report as text."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distcheck.records.decoding import read_bounded
from distcheck.worlds import scratch
from distcheck.worlds.linux import die_with_parent

Ended = tuple[int, str, str]  # exit code, the report's text or "", the end of stderr
_MOST_WORDS = 2000  # characters of stderr


def run_part(words: Sequence[str], folder: str | None) -> Ended:
    """Run `distcheck verify` with these arguments, in a folder or in the task's own."""
    parent = os.getpid()
    with scratch.folder(prefix="distcheck-part-") as place:
        file = Path(place, "part.json")
        ran = subprocess.run(
            # -P: modules in the folder must not shadow distcheck's own.
            [sys.executable, "-P", "-m", "distcheck", "verify", *words, "--json", str(file)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=lambda: die_with_parent(parent),
            check=False,
        )
        text = read_bounded(file).decode() if file.is_file() else ""
    return ran.returncode, text, ran.stderr[-_MOST_WORDS:]
