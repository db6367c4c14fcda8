"""The mark of a job's folder that is in use: a file with a lock (flock) on it.

The kernel takes the lock back when a process ends, however it does. The job's own processes hold
it as well, so a folder whose lock is free has no user left. Imports little: every Python of a job
runs this at its start.
"""

import contextlib
import fcntl
import os

NAME = "in-use"
_held: list[int] = []  # until this process ends: closing one gives its lock back


def begin(folder: str) -> None:
    """Marks a new folder. The file gets its name when the lock is on it, so that it is never seen
    without.
    """
    new = os.path.join(folder, f"{NAME}.new")
    held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _held.append(held)
    os.write(held, machine())
    fcntl.flock(held, fcntl.LOCK_SH)
    os.rename(new, os.path.join(folder, NAME))


def hold(folder: str) -> None:
    """Keeps a job's folder, or the one around it, in use for as long as this process runs."""
    for place in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):  # there is no mark, or no lock can be had
            held = os.open(os.path.join(place, NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _held.append(held)
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return


def is_free(folder: str) -> bool:
    """Whether a folder was marked on this machine, and no process uses it any more."""
    try:
        mark = os.open(os.path.join(folder, NAME), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(mark, 64) == machine() != b""
    except OSError:
        return False
    finally:
        os.close(mark)


def machine() -> bytes:
    """What this machine is called until it is started again: some file systems have locks that
    other machines do not see.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(64).strip()
    except OSError:
        return b""
