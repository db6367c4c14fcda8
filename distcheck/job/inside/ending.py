"""Ends a process of a job before its script does, and leaves nothing that its script would not.

Ranks on other machines, whose folders are not seen here, say in the store of the job's master
whether they have ended, too. It is another connection to it, so that no collective is added to
those of the script.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from distcheck.worlds.mpi.segments import own_segments, remove

_PREFIX = "distcheck/ended"
_ASK_S = 0.1
_PATIENCE_S = 10.0  # for MPI, which waits for all ranks; chosen: they are at the same step


def leave() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    _finalize_mpi()
    os._exit(0)


def _finalize_mpi() -> None:
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


class RankStatuses:
    """What ranks say of themselves in the job's store; without one, nothing is waited for."""

    def __init__(self, rank: int, world: int) -> None:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._keys = [f"{_PREFIX}/{start}/{one}" for one in range(world)]
        self._own, self._asked = self._keys[rank], 0.0
        self._store = _store()
        self._is_over = not self._tell(True)

    def have_ended(self) -> bool:
        """Whether all ranks have written their last step. The master may have left with its store;
        then all had.
        """
        if self._is_over or self._store is None:
            return True
        if time.monotonic() - self._asked < _ASK_S:
            return False
        try:
            ended = bool(self._store.check(self._keys))
        except RuntimeError:
            return True
        self._asked = time.monotonic()
        return ended

    def goes_on(self) -> None:
        """This rank does, and will ask again."""
        self._tell(False)

    def _tell(self, ended: bool) -> bool:
        """Says whether this rank has ended; False where it is not heard."""
        if self._store is None:
            return False
        try:
            if ended:
                self._store.set(self._own, "1")
            else:
                self._store.delete_key(self._own)
        except RuntimeError:  # the master has left, and its store with it
            return False
        return True


def _store() -> "dist.TCPStore | None":  # type: ignore[name-defined]
    """The job's own, by what its launcher has said of it."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
    except (RuntimeError, ValueError):
        return None
