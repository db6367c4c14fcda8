"""Whether this kernel gathers memory into large pages on request, and how much a process has."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest

_LARGE_BYTES = 2 << 20
_COLLAPSE = 25


def large_bytes(pid: int) -> int:
    """How much of a process's anonymous memory is in large pages."""
    found = re.search(r"AnonHugePages:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(found[1]) * 1024 if found else 0


def skip_where_nothing_is_gathered() -> None:
    """Asks the kernel by itself, for memory that has room for one large page."""
    with mmap.mmap(-1, 2 * _LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for at in range(0, len(memory), 4096):
            memory[at] = 1
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = -(-ctypes.addressof(view) // _LARGE_BYTES) * _LARGE_BYTES
        size = ctypes.c_size_t(_LARGE_BYTES)
        refused = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, _COLLAPSE)
        del view
    if refused:
        pytest.skip("this kernel collapses no memory on request: forks cost what they cost")
