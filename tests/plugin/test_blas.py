"""NumPy's OpenBLAS has one thread in a rank, with however many the pytest process has loaded it."""

import os

import numpy as np
import pytest

from distcheck.testing.rank import WorldView

_MATRIX = np.ones((600, 600))  # large enough to be shared out among threads


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.world(2)
def test_fresh_ranks_multiply_alone(world: WorldView) -> None:
    before = _threads()
    assert (_MATRIX @ _MATRIX)[0, 0] == 600
    assert _threads() == before


@pytest.mark.world(2, reuse=True)
def test_kept_ranks_multiply_alone(world: WorldView) -> None:
    before = _threads()
    assert (_MATRIX @ _MATRIX)[0, 0] == 600
    assert _threads() == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one core: OpenBLAS has one thread")
@pytest.mark.skipif(
    bool({"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & {*os.environ}), reason="as many as they say"
)
def test_the_pytest_process_keeps_its_own() -> None:
    """Its threads end at every fork, and begin again with the next product."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    before = _threads()
    assert (_MATRIX @ _MATRIX)[0, 0] == 600
    assert _threads() > before
