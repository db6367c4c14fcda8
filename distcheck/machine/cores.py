"""How many cores this process may fill: those it may run on, or its container's share of them."""

import math
import os
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def cores() -> int:
    """At least 1. A quota of one and a half cores (docker --cpus=1.5) counts as two."""
    linux = hasattr(os, "sched_getaffinity")
    may_run_on = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return max(1, min([may_run_on, *(math.ceil(share) for share in _quotas())]))


def _quotas() -> list[float]:
    """What each control group over this process grants, in cores; those without a limit left out.

    Version 2 writes "QUOTA PERIOD" in cpu.max, or "max PERIOD"; version 1 has a file for each, and
    -1 for no quota (Linux, Documentation/admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst).
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
    """The folders of this process's control groups for the processor, and of those around them."""
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
