"""Ends a process of a job before its script does, and leaves nothing that its script would not."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

_PATIENCE_S = 10.0  # for MPI, which waits for all ranks; chosen: they are at the same step
_SEGMENT = "/dev/shm/sm_segment."


def leave() -> NoReturn:
    """Ends this process as one that succeeded."""
    sys.stdout.flush()
    sys.stderr.flush()
    _finalise_mpi()
    os._exit(0)


def _finalise_mpi() -> None:
    """Does what mpi4py does at the end of Python, where a script has begun MPI (Lightning does by
    itself, to see whether mpirun has started it), and removes the shared memory of Open MPI.
    mpirun removes that itself; of a process that mpirun has not started it stays in /dev/shm.
    """
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    late = threading.Timer(_PATIENCE_S, os._exit, [0])
    late.daemon = True
    late.start()
    segments = [*_own_segments()] if mpi.COMM_WORLD.Get_size() == 1 else []
    mpi.Finalize()
    for path in segments:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _own_segments() -> Iterator[str]:
    """The files of Open MPI's shared memory that this process has mapped: alone, it made them."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for words in map(str.split, maps):
            if words[-1].startswith(_SEGMENT):
                about = os.lstat(words[-1])
                if about.st_uid == os.geteuid() and str(about.st_ino) == words[4]:
                    yield words[-1]
