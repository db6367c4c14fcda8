"""One pool per test process: a helper that has imported torch once."""

from collections.abc import Iterator

import pytest

from distcheck.worlds.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    pool.wait_ready()
    yield pool
    pool.close()
