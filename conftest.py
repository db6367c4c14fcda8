"""Settings of the whole test suite."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Worlds are real processes on shared machines: no example may fail for being slow. A run draws the
# same examples every time, and half as many; the sweep draws new ones (`--hypothesis-profile
# random`).
settings.register_profile(
    "random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile(
    "distcheck", settings.get_profile("random"), derandomize=True, max_examples=50
)
settings.load_profile("distcheck")

pytest_plugins = ["pytester"]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` starts: one process more than there are cores. Worlds take turns, and a test
    that waits for a clock or a launcher leaves its core to another. The last tests are shared out
    again, since some take a hundred times as long as others.
    """
    if config.option.dist == "no":
        config.option.dist = "worksteal"
    return len(os.sched_getaffinity(0)) + 1
