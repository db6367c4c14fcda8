"""Which process of a job is a rank, and notes that processes leave for the front.

Imports little: it runs at the start of every Python that the job starts.
"""

import contextlib
import os
from pathlib import Path

from distcheck import private

# In the environment of a rank: its own process, and what a launcher calls it.
MARK = "DISTCHECK_JOB_RANK"
_CALLED = ("RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK")


def called() -> str:
    """What a launcher calls this process, if one has started it."""
    return ",".join(os.environ.get(name, "") for name in _CALLED).strip(",")


def mark_rank() -> None:
    """What this process starts from now on is not a rank, unless a launcher calls it otherwise."""
    os.environ[MARK] = f"{os.getpid()} {called()}"


def is_of_a_rank() -> bool:
    return os.environ.get(MARK, f"{os.getpid()} ").partition(" ")[0] != str(os.getpid())


def note(settings: str, what: str, text: str = "") -> None:
    """Leaves a file for the front: it says what a process reached before it ended."""
    with contextlib.suppress(OSError):  # the front says that nothing was recorded
        file = Path(os.path.dirname(settings), f"{what}-{os.getpid()}")
        private.write(file, text.encode(errors="surrogateescape"))
