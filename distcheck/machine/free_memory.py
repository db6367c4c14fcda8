"""Memory that this process may still use, and what it keeps of what it has used."""

import ctypes
from pathlib import Path

import psutil

# Training and judging allocate and free the same large tensors at every step. glibc hands each back
# to the kernel and faults it in again page by page, which took half of a float64 step's time.
# Variables are read when a process starts; whatever it forks inherits what they say.
_KEPT_BYTES = 1 << 30
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """The same in this process, from now on, where its C library is glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def available_bytes() -> int:
    """Memory that can still be had: the machine's, or the container's if that is less."""
    available: int = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available
