"""What a task does where an engine has placed it: judges one part of a matrix, in a process of its
own, and gives back the report as text.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distcheck.records.decoding import read_bounded
from distcheck.worlds import scratch
from distcheck.worlds.linux import die_with_parent

Ended = tuple[int, str, str]  # exit code, the report's text or "", the last words of stderr
_MOST_WORDS = 2000  # characters of what was said


def run_part(words: Sequence[str], folder: str | None) -> Ended:
    """Run `distcheck verify` with these words, in a folder or in that of the task."""
    parent = os.getpid()
    with scratch.folder(prefix="distcheck-part-") as place:
        file = Path(place, "part.json")
        ran = subprocess.run(
            # -P: what lies in the folder is not imported in place of distcheck's own modules.
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
