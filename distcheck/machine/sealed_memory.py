"""Shared memory whose size cannot be changed by any process that has its descriptor.

Ranks receive the descriptors of traces and data. Code under test that truncates such memory would
otherwise end every process that reads it, by SIGBUS or by an internal error; with a seal
(memfd_create(2), fcntl(2)) the call fails in the rank that made it.
"""

import fcntl
import os

_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(name: str, size_bytes: int) -> int:
    """Return the descriptor of new sparse memory of a fixed size. Raises OSError."""
    fd = open_memory(name)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(name: str) -> int:
    """Return the descriptor of new, empty memory, for `seal_content` once it is filled."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_content(fd: int) -> None:
    """Prevent every process from writing to the memory or changing its size."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
