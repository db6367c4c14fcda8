"""Memory that this process may still use."""

from pathlib import Path

import psutil


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
