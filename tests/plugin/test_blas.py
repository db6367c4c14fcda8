"""NumPy's OpenBLAS has one thread in a rank, with however many the pytest process has loaded it."""

import contextlib
import ctypes
import os
from pathlib import Path

import numpy as np
import pytest

from distcheck.testing.rank import WorldView

_MATRIX = np.ones((600, 600))  # large enough to be shared out among threads


def _has_name() -> bool:
    """True if a loaded OpenBLAS exports the number of threads."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "openblas" in line:
            with contextlib.suppress(OSError, ValueError):
                ctypes.c_int.in_dll(ctypes.CDLL(line.split(maxsplit=5)[-1]), "blas_cpu_number")
                return True
    return False


limited = pytest.mark.skipif(
    not _has_name(), reason="this OpenBLAS does not export blas_cpu_number (NumPy 2.5)"
)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@limited
@pytest.mark.world(2)
def test_fresh_ranks_multiply_alone(world: WorldView) -> None:
    before = _threads()
    assert (_MATRIX @ _MATRIX)[0, 0] == 600
    assert _threads() == before


@limited
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
