"""What tests of jobs leave in this process."""

import os
from collections.abc import Iterator

import pytest

from distcheck.job.inside.marking import MARK


@pytest.fixture(autouse=True)
def no_rank() -> Iterator[None]:
    """A recorder that a test has made here says that what this process starts is not a rank."""
    yield
    os.environ.pop(MARK, None)
