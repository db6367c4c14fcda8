"""One pool per test process: a helper that has imported torch once."""

import pytest

from distcheck.verification.run import shared_pool
from distcheck.worlds.pool import Pool


@pytest.fixture
def pool() -> Pool:
    """The one that `distcheck.verify` keeps, with a helper that is ready."""
    pool = shared_pool()
    pool.wait_ready()
    return pool
