"""The cores and the memory that this process may use, including the limits of its container, and
the settings with which the C library reuses freed memory.
"""

import ctypes
import math
import os
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")
_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def cores() -> int:
    """Return the number of cores, at least 1. A quota of 1.5 cores (docker --cpus=1.5) counts as
    two.
    """
    linux = hasattr(os, "sched_getaffinity")
    may_run_on = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, min([may_run_on, *(math.ceil(share) for share in _quotas())]))


def _quotas() -> list[float]:
    """Return the CPU limits, in cores, of all control groups above this process that have one.

    Version 2 writes "QUOTA PERIOD", or "max PERIOD", to cpu.max. Version 1 has a file for each
    value, and writes -1 for no quota (Linux, Documentation/admin-guide/cgroup-v2.rst,
    scheduler/sched-bwc.rst).
    """
    found = []
    for folder in _groups():
        texts = _read(folder / "cpu.max").split()
        if not texts:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            texts = [_read(folder / name).strip() for name in names]
        try:
            quota, period = (float(text) for text in texts)
        except ValueError:
            continue
        if quota > 0 and period > 0:
            found.append(quota / period)
    return found


def _groups() -> list[Path]:
    """Return the folders of this process's CPU control groups and of their parent groups."""
    found: dict[Path, None] = {}
    for line in _read(_OF_THIS_PROCESS).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = _MOUNT / controllers
        here = mount / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(mount):
                found[folder] = None
    return list(found)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Training and judging allocate and free the same large tensors at every step. glibc returns each to
# the kernel and faults it in again page by page. Measured: half of the time of a float64 step.
# Variables are read when a process starts; forked processes inherit the effect.
_KEPT_BYTES = 1 << 30
KEEPS_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES),
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Make this process reuse freed memory from now on. Has an effect only if its C library is
    glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def available_bytes() -> int:
    """Return the available memory in bytes: that of the machine, or that of the container if it is
    less.
    """
    available: int = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass
    return available
