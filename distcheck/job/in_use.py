"""Holds a file lock (flock) that marks a job's folder as in use.

The kernel releases the lock when a process exits, however it exits. The job's processes also hold
it, so no process uses a folder whose lock is free. This module imports little, because every Python
process of a job runs it at startup.
"""

import contextlib
import fcntl
import os

NAME = "in-use"
_held: list[int] = []  # until this process exits: closing one releases its lock


def begin(folder: str) -> None:
    """Mark a new folder. The file is renamed after it is locked, so it never appears unlocked."""
    new = os.path.join(folder, f"{NAME}.new")
    held = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _held.append(held)
    os.write(held, machine_boot_id())
    fcntl.flock(held, fcntl.LOCK_SH)
    os.rename(new, os.path.join(folder, NAME))


def keep_in_use(folder: str) -> None:
    """Mark a job's folder, or its parent, as in use until this process exits."""
    for place in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError):  # there is no mark, or no lock is available
            held = os.open(os.path.join(place, NAME), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            _held.append(held)
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return


def is_free(folder: str) -> bool:
    """Return True if a folder was marked on this machine and no process uses it any more."""
    try:
        mark = os.open(os.path.join(folder, NAME), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.read(mark, 64) == machine_boot_id() != b""
    except OSError:
        return False
    finally:
        os.close(mark)


def machine_boot_id() -> bytes:
    """Return an ID that changes at reboot. It shows that a lock belongs to this machine, because on
    some file systems other machines cannot see the lock.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read(64).strip()
    except OSError:
        return b""
