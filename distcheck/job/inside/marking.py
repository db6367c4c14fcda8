"""Identifies the rank processes of a job, and writes notes for the front-end process. Imports
little, because it runs at the start of every Python process of the job.
"""

import contextlib
import os
from pathlib import Path

from distcheck import private

# Environment of a rank: its process, and its names from the launcher.
MARK = "DISTCHECK_JOB_RANK"
SHARED_RANK = "shared-rank"  # the note of a process whose rank another process has recorded
_CALLED = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK")


def launcher_names() -> str:
    """Return the launcher's variables that identify this process, or ""."""
    return ",".join(os.environ.get(name, "") for name in _CALLED).strip(",")


def mark_rank() -> None:
    """Mark this process as a rank. Its child processes are not ranks, unless a launcher gives them
    new variables.
    """
    os.environ[MARK] = f"{os.getpid()} {launcher_names()}"


def is_rank_process() -> bool:
    return os.environ.get(MARK, f"{os.getpid()} ").partition(" ")[0] != str(os.getpid())


def write_note(settings: str, what: str, text: str = "") -> None:
    """Write a note for the front-end process about this process's progress."""
    with contextlib.suppress(OSError):  # the front end reports that nothing was recorded
        file = Path(os.path.dirname(settings), f"{what}-{os.getpid()}")
        private.write(file, text.encode(errors="surrogateescape"))
