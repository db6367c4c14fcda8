"""Exits a job process early, with the same cleanup as a normal exit.

A rank on another machine, whose folder is not visible here, reports in the store of the job's
master that it has finished. It uses a separate connection, so the script's collectives are not
affected.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from distcheck.worlds.mpi_segments import own_segments, remove

_PREFIX = "distcheck/ended"
_ASK_S = 0.1
_PATIENCE_S = 10.0  # Heuristic, for MPI, which waits for all ranks: they are at the same step


def exit_process() -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    _finalize_mpi()
    os._exit(0)


def _finalize_mpi() -> None:
    """Finalize MPI as mpi4py does at exit, if the script has initialized it, and remove Open MPI's
    shared memory.

    Lightning initializes MPI to detect mpirun. mpirun removes the shared memory itself; a process
    started without it would leave it in /dev/shm.
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
    """Status of all ranks, in the job's store. If there is no store, this rank does not wait for
    others.
    """

    def __init__(self, rank: int, world: int) -> None:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._keys = [f"{_PREFIX}/{start}/{one}" for one in range(world)]
        self._own, self._asked = self._keys[rank], 0.0
        self._store = _store()
        self._is_over = not self._publish_status(True)

    def have_ended(self) -> bool:
        """Return True if all ranks have finished, or the master has exited with its store."""
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
        """Record that this rank continues, and will ask again later."""
        self._publish_status(False)

    def _publish_status(self, ended: bool) -> bool:
        """Record whether this rank has finished; return False if the store is gone."""
        if self._store is None:
            return False
        try:
            if ended:
                self._store.set(self._own, "1")
            else:
                self._store.delete_key(self._own)
        except RuntimeError:  # the master has exited, and its store with it
            return False
        return True


def _store() -> "dist.TCPStore | None":  # type: ignore[name-defined]
    """Connect to the job's store by its launcher's environment variables, or return None."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False
        )
    except (RuntimeError, ValueError):
        return None
