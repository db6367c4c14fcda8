"""Removes files that Open MPI leaves in shared memory. If mpirun did not start a process, Open MPI
removes its files only when Python exits normally. Ranks and recorded processes never exit normally.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_SEGMENT = "/dev/shm/sm_segment."


def own_segments() -> list[str]:
    """Return the segments that this process created: those that it has mapped, in a world of size
    1.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return []
    return [*_mapped()] if mpi.COMM_WORLD.Get_size() == 1 else []


def remove(segments: list[str]) -> None:
    """Unlink segments. Processes that have mapped them can continue to use them."""
    for path in segments:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _mapped() -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for words in map(str.split, maps):
            if words[-1].startswith(_SEGMENT):
                about = os.lstat(words[-1])
                if about.st_uid == os.geteuid() and str(about.st_ino) == words[4]:
                    yield words[-1]
