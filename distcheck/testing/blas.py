"""One thread for OpenBLAS in ranks, which inherit it from the pytest process with all of its own.

OPENBLAS_NUM_THREADS is read when the library is loaded, before there is any rank. Its own
openblas_set_num_threads() would first start anew, in every rank, the threads that the fork has
lost, one for each core, and they spin a while for work that never comes. The number that it would
then write is a global of the library (blas_cpu_number, of driver/others/blas_server.c), as old as
the library itself, and is written here. A library without that name is left as it is.

Measured (2 cores, medians of 15 ranks): a rank's first product takes 14 ms of CPU with all threads,
1.5 ms with this, and 1.8 to 3.5 ms through threadpoolctl, which calls openblas_set_num_threads().
"""

import contextlib
import ctypes
import os
import sys

_LOADED_BY = ("numpy", "scipy.linalg")  # each with a library of its own, as PyPI has them

_looked_with: list[str] = []
_counts: list[ctypes.c_int] = []


def look() -> None:
    """In the pytest process: finds what is loaded, once for each module that may have loaded it."""
    loaded = [name for name in _LOADED_BY if name in sys.modules]
    if loaded == _looked_with:
        return
    _looked_with[:] = loaded
    _counts.clear()
    lines: list[str] = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        lines = [line for line in maps if "openblas" in line]
    paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in lines}
    for path in sorted(paths):
        with contextlib.suppress(OSError, ValueError):  # another kind of file, or without it
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
            _counts.append(ctypes.c_int.in_dll(library, "blas_cpu_number"))


def take_one_thread() -> None:
    """In a rank."""
    for count in _counts:
        count.value = 1
