"""Ends a process of a job before its script does, and leaves nothing that its script would not."""

import os
import sys
import threading
from typing import Any, NoReturn

from distcheck.worlds.mpi.segments import own_segments, remove

_PATIENCE_S = 10.0  # for MPI, which waits for all ranks; chosen: they are at the same step


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
    segments = own_segments()
    mpi.Finalize()
    remove(segments)
