"""Files that Open MPI keeps in shared memory: of a process that mpirun has not started they stay
behind, unless Python itself ends it, and no rank or recorded process ends so.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_SEGMENT = "/dev/shm/sm_segment."


def own_segments() -> list[str]:
    """Those that this process has made: what it has mapped, where it is alone in its MPI."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return []
    return [*_mapped()] if mpi.COMM_WORLD.Get_size() == 1 else []


def remove(segments: list[str]) -> None:
    """Removes their names; who has them mapped can go on using them."""
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
