"""Ranks on other machines, whose folders are not seen here: whether they have ended, too.

They say so in the store of the job's master, which every rank of it can reach. It is another
connection to it, so that no collective is added to those of the script.
"""

import os
import time
from datetime import timedelta

import torch.distributed as dist

_PREFIX = "distcheck/ended"
_ASK_S = 0.1


class Elsewhere:
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
