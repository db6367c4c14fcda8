"""Shared memory whose size no process can change, even if it has the descriptor.

Ranks receive the descriptors of traces and data. If code under test could truncate such memory,
every process that reads it would end by SIGBUS or an internal error. With a seal (memfd_create(2),
fcntl(2)), the truncation fails in the rank that attempts it.
"""

import fcntl
import os

_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(name: str, size_bytes: int) -> int:
    """Create sparse memory of a fixed size and return its descriptor. Raises OSError."""
    fd = open_memory(name)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(name: str) -> int:
    """Create empty memory and return its descriptor. Call `seal_content` after filling it."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_content(fd: int) -> None:
    """Prevent all processes from writing to the memory and from changing its size."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
