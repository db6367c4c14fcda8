"""Shared memory whose size no process that holds its descriptor can change.

Ranks are given the descriptors of traces and data. Code under test that shortens such memory would
otherwise end every process that reads it, by SIGBUS or by an error of distcheck's own; with a seal
(memfd_create(2), fcntl(2)) the call fails in the rank that made it.
"""

import fcntl
import os

_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(name: str, size_bytes: int) -> int:
    """Return the descriptor of new memory of a fixed size, which takes up no more than what is
    written to it. Raises OSError.
    """
    fd = open_memory(name)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_memory(name: str) -> int:
    """Return the descriptor of new memory, empty, for `seal_content` once it is filled."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def seal_content(fd: int) -> None:
    """From now on no process can write into it, or change its size."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
