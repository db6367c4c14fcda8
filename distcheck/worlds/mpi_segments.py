"""Removes Open MPI's files in shared memory. A process that mpirun did not start leaves them behind
unless Python exits normally, which ranks and recorded processes never do.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_SEGMENT = "/dev/shm/sm_segment."


def own_segments() -> list[str]:
    """Return the segments created by this process: those it has mapped, in a world of 1."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return []
    return [*_mapped()] if mpi.COMM_WORLD.Get_size() == 1 else []


def remove(segments: list[str]) -> None:
    """Unlink segments; processes that have them mapped can continue to use them."""
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
