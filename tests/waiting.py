"""Waiting in tests, without a limit of its own: how long a loaded machine takes is unknown."""

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], *, every_s: float = 0.05) -> None:
    """Wait for a condition. What never comes ends at the time limit of the test."""
    while not condition():
        time.sleep(every_s)


def is_written(file: Path) -> bool:
    """Return True if a file has its one line, to the end."""
    return file.exists() and file.read_text().endswith("\n")
