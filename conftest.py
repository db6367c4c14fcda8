"""Settings of the whole test suite."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Worlds are real processes on shared machines: no example may fail for being slow.
settings.register_profile(
    "distcheck", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("distcheck")

pytest_plugins = ["pytester"]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` starts: one process more than there are cores. Worlds take turns, and a test
    that waits for a clock or a launcher leaves its core to another.
    """
    return len(os.sched_getaffinity(0)) + 1
